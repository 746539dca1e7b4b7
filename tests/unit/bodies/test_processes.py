"""Environments in processes: the same episodes as in the rank, and a crash or hang costs only its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.small_bodies import WORLD, Bins
from tests.small_worlds import Line

from leaderless.config.body import BodyConfig
from leaderless.observability.clock import Clock
from leaderless.rollout.bodies import BodyEngine, BodyEpisode, BodyTask
from leaderless.rollout.worlds import Worlds, open_worlds

NUM, CHUNK = 7, 2


def config_of(fault: str = "", *, processes: int = 0, timeout_s: float = 30.0) -> BodyConfig:
    name = f"{WORLD}:Faulty"
    options = {"fault": fault} if fault else {}
    return BodyConfig(type=name, options=options, num_environments=NUM, processes=processes, step_timeout_s=timeout_s)


@pytest.fixture
def opened() -> Iterator[list[Worlds]]:
    worlds: list[Worlds] = []
    yield worlds
    for one in worlds:
        one.close()


def played(config: BodyConfig, opened: list[Worlds], num: int = 24) -> list[BodyEpisode]:
    torch.manual_seed(0)

    def open_and_keep() -> Worlds:
        opened.append(open_worlds(config, CHUNK))
        return opened[-1]

    engine = BodyEngine(Bins(Line(1).spaces), open_and_keep, torch.device("cpu"))
    tasks = [BodyTask(number, {"task": number}, seed=number) for number in range(num)]
    return engine.play(tasks, seed=1, temperature=1.0, progress=lambda _: None, clock=Clock())


def assert_same(one: BodyEpisode, other: BodyEpisode) -> None:
    assert (one.num_steps, one.rewards, one.instruction) == (other.num_steps, other.rewards, other.instruction)
    assert (one.is_success, one.is_terminated, one.failure) == (other.is_success, other.is_terminated, other.failure)
    for mine, others in zip(one.frames, other.frames, strict=True):
        np.testing.assert_array_equal(mine, others)
    for mine, others in zip(one.states, other.states, strict=True):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_play_the_same_episodes(opened: list[Worlds], processes: int) -> None:
    expected = played(config_of(), opened)
    for one, other in zip(played(config_of(processes=processes), opened), expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("crash", "has ended with exit code 7"),
        ("hang", "has not answered 'step' within 1 s"),
        ("raise", "RuntimeError: it is broken there"),
    ],
)
def test_a_fault_costs_the_episodes_of_its_process(opened: list[Worlds], fault: str, reason: str) -> None:
    expected = played(config_of(), opened)
    timeout_s = 1.0 if fault == "hang" else 30.0
    found = played(config_of(fault, processes=3, timeout_s=timeout_s), opened)
    failed = [episode for episode in found if episode.failure is not None]
    assert any(reason in str(episode.failure) for episode in failed), [episode.failure for episode in failed]
    whole = [(one, other) for one, other in zip(found, expected, strict=True) if one.failure is None]
    assert len(whole) >= 6
    for one, other in whole:
        assert_same(one, other)


def test_nothing_is_left_behind(opened: list[Worlds]) -> None:
    def left() -> set[str]:
        return {file.name for file in Path("/dev/shm").glob("leaderless-*")}

    before = left()
    played(config_of(processes=2), opened)
    assert left() <= before, "files have no names while they are used"
    processes = [one._process for one in opened[-1]._processes]  # type: ignore[attr-defined]
    assert all(process is not None and process.is_alive() for process in processes)
    opened.pop().close()
    gc.collect()
    assert not any(process.is_alive() for process in processes)


def test_more_processes_than_episodes_are_not_started() -> None:
    worlds = open_worlds(BodyConfig(type=f"{WORLD}:Line", num_environments=2, processes=5), CHUNK)
    assert sorted(slot for half in worlds.halves() for slot in half) == [0, 1]
    worlds.close()
