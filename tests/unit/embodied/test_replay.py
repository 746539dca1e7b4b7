"""The replay buffer: what is drawn, and what a kill leaves of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leaderless.embodied.data.replay_buffer import RECORDS_FILE, ReplayBuffer, Transitions
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces

SPACES = Spaces({"top": (2, 3)}, 4, Continuous((-1.0, -1.0), (1.0, 1.0)), 8)
CHUNK = 2


def transitions(first: int, num: int) -> Transitions:
    """Transitions of which each number tells which one it is."""
    rows = np.arange(first, first + num)

    def of(*shape: int, dtype: type) -> np.ndarray:
        return np.broadcast_to(rows.reshape(-1, *[1] * len(shape)), (num, *shape)).astype(dtype)

    return Transitions(
        images={"top": of(2, 3, 3, dtype=np.uint8)},
        state=of(4, dtype=np.float32),
        next_images={"top": of(2, 3, 3, dtype=np.uint8) + np.uint8(1)},
        next_state=of(4, dtype=np.float32) + np.float32(1),
        actions=of(CHUNK, 2, dtype=np.float32),
        rewards=of(CHUNK, dtype=np.float32),
        num_steps=of(dtype=np.int64),
        terminated=of(dtype=np.int64) % 2 == 0,
        truncated=of(dtype=np.int64) % 3 == 0,
        intervened=of(CHUNK, dtype=np.int64) % 5 == 0,
    )


def assert_equal(found: Transitions, expected: Transitions) -> None:
    for name, value in vars(expected).items():
        if isinstance(value, dict):
            assert all((getattr(found, name)[camera] == images).all() for camera, images in value.items())
        else:
            assert (getattr(found, name) == value).all(), name


def test_what_is_appended_is_found_again_in_another_process_too(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, SPACES, CHUNK)
    buffer.append(transitions(0, 3))
    assert_equal(buffer.take(np.arange(3)), transitions(0, 3))
    buffer.append(transitions(3, 2))
    buffer.append(transitions(5, 0))
    buffer.sync()
    buffer.close()
    buffer.close()
    again = ReplayBuffer(tmp_path, SPACES, CHUNK)
    assert len(again) == 5
    assert_equal(again.take(np.array([4, 0])), transitions(0, 5).take(np.array([4, 0])))


def test_draws_follow_from_seed_step_and_number(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, SPACES, CHUNK)
    buffer.append(transitions(0, 100))
    first = buffer.sample(32, seed=1, step=7)
    assert_equal(buffer.sample(32, seed=1, step=7), first)
    assert (buffer.sample(32, seed=1, step=8).state != first.state).any()
    assert (buffer.sample(32, seed=2, step=7).state != first.state).any()
    buffer.append(transitions(100, 50))
    buffer.truncate(100)  # as a run does that continues from its checkpoint
    assert_equal(buffer.sample(32, seed=1, step=7), first)
    drawn = buffer.sample(4000, seed=0, step=0).state[:, 0]
    assert np.bincount(drawn.astype(int), minlength=100).min() > 10
    with pytest.raises(ValueError, match="num=101"):
        buffer.truncate(101)


def test_a_torn_tail_is_cut_and_no_more(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, SPACES, CHUNK)
    buffer.append(transitions(0, 5))
    buffer.close()
    path = tmp_path / RECORDS_FILE
    whole = path.read_bytes()
    size = len(whole) // 5
    for torn in (whole[:-1], whole[: 4 * size + 1], whole[: 4 * size] + bytes(size), whole[:-size] + whole[-size:-1]):
        path.write_bytes(torn)
        again = ReplayBuffer(tmp_path, SPACES, CHUNK)
        assert len(again) == 4
        again.append(transitions(4, 1))
        assert_equal(again.take(np.arange(5)), transitions(0, 5))
        again.close()
        assert path.read_bytes() == whole


WRITER = """
import sys
from pathlib import Path
from tests.unit.embodied.test_replay import CHUNK, SPACES, transitions
from leaderless.embodied.data.replay_buffer import ReplayBuffer
buffer = ReplayBuffer(Path(sys.argv[1]), SPACES, CHUNK)
for number in range(0, 10**9, 7):
    buffer.append(transitions(number, 7))
    print(number + 7, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_had_appended(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert writer.stdout is not None
    promised = 0
    for _ in range(50):
        promised = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    promised = max([promised, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
    writer.wait()
    buffer = ReplayBuffer(tmp_path, SPACES, CHUNK)
    assert promised <= len(buffer)
    assert_equal(buffer.take(np.arange(len(buffer))), transitions(0, len(buffer)))


def test_other_bodies_choices_and_empty_buffers_are_refused(tmp_path: Path) -> None:
    buffer = ReplayBuffer(tmp_path, SPACES, CHUNK)
    with pytest.raises(ValueError, match="is empty"):
        buffer.sample(1, seed=0, step=0)
    with pytest.raises(ValueError, match="another body: chunk=2"):
        ReplayBuffer(tmp_path, SPACES, CHUNK + 1)
    with pytest.raises(ValueError, match="choices"):
        ReplayBuffer(tmp_path, Spaces({}, 1, Discrete(3), 8), CHUNK)
