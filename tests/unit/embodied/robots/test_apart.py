"""An actor and a learner as two programs: the arm goes on when the learner is killed, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from examples.robots.apart import CHUNK, SPACES
from safetensors import safe_open
from tests.end_to_end.cli import TIMEOUT_S, start
from tests.unit.embodied.robots.serving import SpyArm, assert_limits_hold, serving, station_of

from leaderless.embodied.data.replay_buffer import ReplayBuffer


def await_that(is_so: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    """Wait for what processes do; one that has ended is an error, with what it has said."""
    until_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s
        time.sleep(0.05)


def updates(folder: Path) -> int:
    """Updates of the learner, by the state that it wrote last."""
    file = folder / "learner.safetensors"
    if not file.exists():
        return 0
    with safe_open(file, "pt") as found:
        return int(found.metadata()["updates"])


def count(folder: Path) -> int:
    """Transitions that are kept by now."""
    with closing(ReplayBuffer(folder / "transitions", SPACES, CHUNK, is_reader=True)) as buffer:
        return len(buffer)


def test_the_arm_goes_on_when_the_learner_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    arm, records = SpyArm(), tmp_path / "transitions/transitions.bin"
    with serving(station_of(arm)) as served:
        actor = start(tmp_path, "examples.robots.apart", "act", served.address, tmp_path)
        learner = start(tmp_path, "examples.robots.apart", "learn", "-", tmp_path)
        await_that(lambda: updates(tmp_path) > 0, actor, learner)
        os.kill(learner.pid, signal.SIGKILL)
        learner.wait()
        kept, before, made = records.read_bytes(), updates(tmp_path), count(tmp_path)
        await_that(lambda: count(tmp_path) > made + 50, actor)
        learner = start(tmp_path, "examples.robots.apart", "learn", "-", tmp_path)
        await_that(lambda: updates(tmp_path) > before, actor, learner)
        for process in (learner, actor):
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
    assert records.read_bytes().startswith(kept)
    assert_limits_hold(arm)
    with closing(ReplayBuffer(tmp_path / "transitions", SPACES, CHUNK)) as buffer:
        found = buffer.take(np.arange(len(buffer)))
    goes_on = ~(found.terminated | found.truncated)[:-1]
    np.testing.assert_array_equal(found.next_state[:-1][goes_on], found.state[1:][goes_on])
