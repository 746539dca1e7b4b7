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

from leaderless.config.environment import BodyConfig
from leaderless.data.batch import Batch
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyEpisode, BodyTask
from leaderless.embodied.rollout.vector_envs import VectorEnvs, open_worlds
from leaderless.embodied.simulators.faulty import Faulty
from leaderless.embodied.stages.rollout import BodyRows
from leaderless.observability.clock import Clock

NUM, CHUNK = 7, 2


def config_of(fault: str = "", *, processes: int = 0, timeout_s: float = 30.0) -> BodyConfig:
    name = f"{WORLD}:Faulty"
    options = {"fault": fault} if fault else {}
    return BodyConfig(type=name, options=options, num_environments=NUM, processes=processes, step_timeout_s=timeout_s)


@pytest.fixture
def opened() -> Iterator[list[VectorEnvs]]:
    worlds: list[VectorEnvs] = []
    yield worlds
    for one in worlds:
        one.close()


def played(config: BodyConfig, opened: list[VectorEnvs], num: int = 24) -> list[BodyEpisode]:
    torch.manual_seed(0)

    def open_and_keep() -> VectorEnvs:
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
def test_processes_play_the_same_episodes(opened: list[VectorEnvs], processes: int) -> None:
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
def test_a_fault_costs_the_episodes_of_its_process(opened: list[VectorEnvs], fault: str, reason: str) -> None:
    expected = played(config_of(), opened)
    timeout_s = 1.0 if fault == "hang" else 30.0
    found = played(config_of(fault, processes=3, timeout_s=timeout_s), opened)
    failed = [episode for episode in found if episode.failure is not None]
    assert any(reason in str(episode.failure) for episode in failed), [episode.failure for episode in failed]
    whole = [(one, other) for one, other in zip(found, expected, strict=True) if one.failure is None]
    assert len(whole) >= 6
    for one, other in whole:
        assert_same(one, other)


def test_an_episode_does_not_continue_in_a_process_in_which_it_has_not_begun(opened: list[VectorEnvs]) -> None:
    worlds = open_worlds(config_of(processes=1), CHUNK)
    opened.append(worlds)
    tasks, seeds, actions = [{}, {}], [0, 1], np.zeros((2, CHUNK, 1), np.float32)
    worlds.reset([0, 1], tasks, seeds)
    worlds._processes[0]._process.kill()  # type: ignore[attr-defined]
    worlds._processes[0]._process.join()  # type: ignore[attr-defined]
    assert worlds.reset([0], tasks[:1], seeds[:1])[0] == {}, "in another process"
    worlds.begin_step([0, 1], actions)
    assert set(worlds.finish_step([0, 1])[0]) == {0, 1}
    worlds.reset([0, 1], tasks, seeds)
    worlds.begin_step([0, 1], actions)
    assert worlds.finish_step([0, 1])[0] == {}


def test_siblings_of_an_episode_that_did_not_begin_keep_their_instruction(opened: list[VectorEnvs]) -> None:
    whole = played(config_of(), opened, 1)[0]
    policy = Bins(Line(1).spaces)
    tasks = Batch(torch.arange(2) << 16, {"rows": ({}, {})})
    broken = BodyEpisode(failure="it is broken")
    episodes = [broken, whole, broken, broken]
    prompts = BodyRows(policy, config_of(), 1.0, 0).samples(tasks, torch.arange(4), episodes).prompts
    assert prompts is not None
    assert prompts.jagged("prompt_tokens").to_lists() == [policy.instruction_ids(whole.instruction), [0]]
    assert whole.instruction


@pytest.mark.parametrize(("processes", "expected"), [(0, 3), (2, 1), (9, 1)])
def test_the_policy_leaves_cores_to_the_processes_while_they_step(
    opened: list[VectorEnvs], monkeypatch: pytest.MonkeyPatch, processes: int, expected: int
) -> None:
    seen, act, before = set(), Bins.act, torch.get_num_threads()
    monkeypatch.setattr(Bins, "act", lambda *given: (seen.add(torch.get_num_threads()), act(*given))[1])
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(3)
    try:
        played(config_of(processes=processes), opened, 2)
        assert (seen, torch.get_num_threads()) == ({expected}, 3)
    finally:
        torch.set_num_threads(before)


def test_nothing_is_left_behind(opened: list[VectorEnvs]) -> None:
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


def test_processes_begin_episodes_at_the_same_time(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "num_processes": 2}
    worlds = open_worlds(BodyConfig(type=f"{WORLD}:Meeting", options=options, num_environments=2, processes=2), CHUNK)
    failures, seen = worlds.reset([0, 1], [{}, {}], [0, 1])
    worlds.close()
    assert (failures, len(seen.state)) == ({}, 2)


def test_more_processes_than_episodes_are_not_started() -> None:
    worlds = open_worlds(BodyConfig(type=f"{WORLD}:Line", num_environments=2, processes=5), CHUNK)
    assert sorted(slot for half in worlds.halves() for slot in half) == [0, 1]
    worlds.close()


def faulty(processes: int, **shares: float) -> BodyConfig:
    options = {"type": f"{WORLD}:Line", **shares}
    return BodyConfig(type="faulty", options=options, num_environments=4, processes=processes, step_timeout_s=5.0)


@pytest.mark.parametrize(
    ("processes", "shares", "reasons"),
    [
        (0, {"error": 0.25}, ["RuntimeError: this episode fails on purpose"]),
        (0, {"crash": 0.25}, ["a crash on purpose would take the whole rank with it: set body.processes"]),
        (4, {"crash": 0.2, "error": 0.2}, ["ended with exit code 70", "this episode fails on purpose"]),
    ],
)
def test_faults_on_purpose_cost_episodes(
    opened: list[VectorEnvs], processes: int, shares: dict[str, float], reasons: list[str]
) -> None:
    found = [one.failure for one in played(faulty(processes, **shares), opened)]
    for reason in reasons:
        assert any(reason in one for one in found if one is not None), found
    world = Faulty(1, **shares)
    wrong = [number for number in range(24) if world.fault_of(number)]
    assert 0 < len(wrong) < 12
    assert all(found[number] is not None for number in wrong)
    if processes == 4:  # each episode has a process of its own
        assert [number for number, one in enumerate(found) if one is not None] == wrong


def test_faults_have_their_shares() -> None:
    world = Faulty(1, crash=0.1, hang=0.2, error=0.3)
    found = [world.fault_of(seed) for seed in range(4000)]
    for name, share in {"crash": 0.1, "hang": 0.2, "error": 0.3}.items():
        assert found.count(name) / len(found) == pytest.approx(share, abs=0.025)
    with pytest.raises(ValueError, match="their sum at most 1"):
        Faulty(1, crash=0.6, error=0.5)
