"""Signals that ask a rank to stop."""

from __future__ import annotations

import os
import signal

import pytest

from leaderless.worker.supervision.stop import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=[number.name for number in STOP_SIGNALS])
def test_a_signal_that_the_starter_has_blocked_still_asks_to_stop(number: signal.Signals) -> None:
    """Actors of Ray block Ctrl-C, and processes inherit that."""
    said: list[str] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        with StopRequest(60.0, lambda: said.append("stopping"), lambda: said.append("too late")) as request:
            os.kill(os.getpid(), number)
            assert request.signal == number
        assert number in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "it is as before"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert said == ["stopping"]
