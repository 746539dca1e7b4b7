"""Signals that ask a rank to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from leaderless.worker.supervision import stop
from leaderless.worker.supervision.stop import LAUNCHER_VARIABLE, STOP_SIGNALS, StopRequest

GRACE_S = 0.2


@contextmanager
def request(said: list[str], grace_s: float = 60.0) -> Iterator[StopRequest]:
    words = ("stopping", "preempted", "too late")
    functions: list[Callable[[], None]] = [lambda word=word: said.append(word) for word in words]  # type: ignore[misc]
    with StopRequest(grace_s, *functions) as found:
        yield found


def wait_for(said: list[str], *expected: str) -> None:
    end = time.monotonic() + 30
    while said != [*expected] and time.monotonic() < end:
        time.sleep(0.01)
    assert said == [*expected]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr(stop.os, "_exit", codes.append)
    return codes


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=[number.name for number in STOP_SIGNALS])
def test_a_signal_that_the_starter_has_blocked_still_asks_to_stop(number: signal.Signals) -> None:
    """Actors of Ray block Ctrl-C, and processes inherit that."""
    said: list[str] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        with request(said) as found:
            os.kill(os.getpid(), number)
            assert found.signal == number
            wait_for(said, "stopping" if number == signal.SIGINT else "preempted")
        assert number in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "it is as before"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_ctrl_c_leaves_a_step_its_time_and_a_preemption_does_not(ended: list[int]) -> None:
    said: list[str] = []
    with request(said, GRACE_S) as found:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2 * GRACE_S + stop.ONE_PRESS_S)
        assert said == ["stopping"]
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(said, "stopping", "preempted", "too late")
        assert found.signal == signal.SIGINT
    assert ended == [128 + signal.SIGTERM]


def test_the_folder_of_a_run_asks_once_and_without_a_limit(ended: list[int]) -> None:
    said: list[str] = []
    with request(said, GRACE_S) as found:
        for _ in range(3):
            found.ask()
        time.sleep(2 * GRACE_S)
        assert found.signal == signal.SIGTERM
    assert said == ["stopping"]
    assert ended == []


@pytest.mark.parametrize("has_launcher", [False, True])
def test_torchrun_gives_a_step_no_time_after_ctrl_c(monkeypatch: pytest.MonkeyPatch, *, has_launcher: bool) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if has_launcher:  # which was started within one
        monkeypatch.setenv(LAUNCHER_VARIABLE, "1")
    said: list[str] = []
    with request(said):
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(said, "stopping" if has_launcher else "preempted")
