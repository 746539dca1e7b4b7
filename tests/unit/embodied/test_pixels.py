"""Pixels move as bytes, once: from an environment to its rank, and from there to the policy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from tests.unit.embodied.cameras import SIZE, Cameras
from torch import Tensor

from leaderless.config.environment import BodyConfig
from leaderless.embodied.policies.mlp import Mlp
from leaderless.embodied.policies.protocol import Acted, Observed
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyTask
from leaderless.embodied.rollout.vector_envs import VectorEnvs, open_worlds
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.observability.clock import Clock

NUM = 6
BYTES = 2 * SIZE * SIZE * 3
"""Bytes that an episode shows at a time, by two cameras."""


@pytest.fixture
def worlds_of() -> Iterator[Callable[[int], VectorEnvs]]:
    opened: list[VectorEnvs] = []

    def open_one(processes: int) -> VectorEnvs:
        config = BodyConfig(type=f"{Cameras.__module__}:Cameras", num_environments=NUM, processes=processes)
        opened.append(open_worlds(config, 1))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def most_memory(act: Callable[[], object]) -> int:
    """Most bytes that numpy holds at once in addition, as far as they are pixels."""
    tracemalloc.start()
    try:
        kept = act()
        return tracemalloc.get_traced_memory()[1] if kept else 0
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rank_copies_what_processes_show_once(
    worlds_of: Callable[[int], VectorEnvs], processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    receive = Connection.recv_bytes

    def counted(connection: Connection, maxlength: int | None = None) -> bytes:
        message = receive(connection, maxlength)
        sizes.append(len(message))
        return message

    monkeypatch.setattr(Connection, "recv_bytes", counted)
    worlds, slots, actions = worlds_of(processes), list(range(NUM))[::-1], np.zeros((NUM, 1, 1), np.float32)
    own = Cameras(NUM)
    wanted = own.reset(slots, [{}] * NUM, slots)
    assert worlds.reset(slots, [{}] * NUM, slots)[0] == {}  # starts the processes
    needed = NUM * BYTES
    assert needed <= most_memory(lambda: worlds.reset(slots, [{}] * NUM, slots)) < 1.1 * needed
    worlds.begin_step(slots, actions)
    found = []
    assert needed <= most_memory(lambda: found.append(worlds.finish_step(slots)) or found) < 1.1 * needed
    wanted, (failures, steps) = own.step(slots, actions).observations, found[0]
    assert failures == {}
    for name, images in wanted.images.items():
        assert (steps.observations.images[name] == images).all()
    assert len(sizes) >= 3 * processes
    assert max(sizes) < SIZE * SIZE, "messages have no pixels"


class Watching(Mlp):
    """A policy that notes what it is given."""

    def __init__(self, spaces: Spaces) -> None:
        super().__init__(spaces)
        self.given: list[dict[str, Tensor]] = []

    def act(self, observed: Observed, noise: Tensor | None, temperature: float = 1.0) -> Acted:
        self.given.append(dict(observed.images))
        return super().act(observed, noise, temperature)


def test_a_policy_gets_bytes_that_were_put_together_once(worlds_of: Callable[[int], VectorEnvs]) -> None:
    policy = Watching(Cameras(1).spaces)
    engine = BodyEngine(policy, lambda: worlds_of(0), torch.device("cpu"))
    tasks = [BodyTask(number, {}, number, keeps_frames=False) for number in range(NUM)]
    episodes = engine.play(tasks, seed=0, temperature=1.0, progress=lambda _: None, clock=Clock())
    assert len(policy.given) == max(len(one.num_steps) for one in episodes)
    for left, right in (images.values() for images in policy.given):
        assert left.dtype == right.dtype == torch.uint8
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr(), "parts of one array"
        assert left.untyped_storage().nbytes() == len(left) * BYTES, "and of nothing else"
    playing = [one for one in episodes if one.frames]
    policy.given.clear()
    needed = NUM * BYTES
    extra = most_memory(lambda: engine.decide(playing, tasks, 0, 1.0) is not None)
    assert needed <= extra < 1.1 * needed, "a pass holds its own copy, and no other"
