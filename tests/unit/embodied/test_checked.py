"""What environments show is checked while they are played: what is wrong ends a run, or fails an episode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.small_bodies import Bins
from tests.small_worlds import Line

from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.rollout.policy_rollout import BodyEngine, BodyEpisode, BodyTask
from leaderless.embodied.rollout.vector_envs import open_worlds
from leaderless.embodied.simulators.protocol import Observations, check_steps, not_finite
from leaderless.embodied.simulators.tabletop import TableTask
from leaderless.observability.clock import Clock

CHUNK = 2


@contextmanager
def engine_of(fault: str, processes: int, name: str = "Wrong") -> Iterator[BodyEngine]:
    options = {"fault": fault}
    config = BodyConfig(
        type=f"tests.small_worlds:{name}", options=options, num_environments=4, processes=processes, step_timeout_s=60
    )
    torch.manual_seed(0)
    engine = BodyEngine(Bins(Line(1).spaces), lambda: open_worlds(config, CHUNK), torch.device("cpu"))
    try:
        yield engine
    finally:
        engine.close()


def played(engine: BodyEngine, group_size: int = 1, keeps_frames: bool = True) -> list[BodyEpisode]:
    rows = [{"task": number} for number in range(12)]
    tasks = [
        BodyTask(number, rows[number // group_size], seed=number // group_size, keeps_frames=keeps_frames)
        for number in range(len(rows))
    ]
    return engine.play(tasks, seed=1, temperature=1.0, progress=lambda _: None, clock=Clock())


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("gray", r"camera 'top' is uint8 \(\d, 1, 8\), not uint8 \(\d, 1, 8, 3\)"),
        ("floats", r"camera 'top' is float32 \(\d, 1, 8, 3\), not uint8"),
        ("long state", r"the state is float32 \(\d, 4\), not float32 \(\d, 2\)"),
        ("double", r"the state is float64 \(\d, 2\), not float32"),
        ("short", r"num_steps=\[0.*\] of a chunk of 2"),
    ],
)
def test_what_is_not_as_declared_ends_the_run(fault: str, message: str, processes: int) -> None:
    with engine_of(fault, processes) as engine, pytest.raises(RecipeError, match=message) as caught:
        played(engine)
    assert "body.type" in str(caught.value)
    assert "correct the environment, or the `spaces` that it declares" in str(caught.value)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan state", "number 1 of the state is nan in environment"),
        ("nan later", "number 1 of the state is nan in environment"),
        ("nan reward", "the reward of step 0 is nan in environment"),
    ],
)
def test_numbers_that_are_not_finite_cost_their_episodes_alone(fault: str, reason: str, processes: int) -> None:
    with engine_of("", 0) as engine:
        expected = played(engine)
    with engine_of(fault, processes) as engine:
        found = played(engine)
    is_bad = [np.random.default_rng(seed).uniform(-2, 2) > 1 for seed in range(12)]
    assert 0 < sum(is_bad) < 12
    for one, other, bad in zip(found, expected, is_bad, strict=True):
        if bad:
            assert one.failure is not None
            assert reason in one.failure
            assert not one.frames
        else:
            assert (one.failure, one.rewards, one.num_steps) == (None, other.rewards, other.num_steps)


@pytest.mark.parametrize(("processes", "keeps_frames"), [(0, True), (0, False), (1, True)])
@pytest.mark.parametrize(
    ("fault", "difference"),
    [
        ("start", r"number 0 of the state is .* in one and .* in another"),
        ("words", r"the instruction is 'go to the middle, 0' in one and 'go to the middle, 1' in another"),
        ("picture", "100.0% of the pixels' numbers differ"),
    ],
)
def test_episodes_of_a_group_begin_alike(fault: str, difference: str, processes: int, keeps_frames: bool) -> None:
    begun = rf'with the task \{{"task": 0\}} and the seed 0, {difference}'
    with engine_of(fault, processes) as engine, pytest.raises(RecipeError, match=begun):
        played(engine, group_size=2, keeps_frames=keeps_frames)
    if processes == 0:
        with engine_of(fault, 0) as engine:
            assert all(one.failure is None for one in played(engine)), "groups of one"


def test_groups_may_differ_by_what_drawing_does_and_on_real_robots() -> None:
    with engine_of("dither", 0) as engine:
        assert all(one.failure is None for one in played(engine, group_size=2))
    with engine_of("start", 0, "Unsaved") as engine:
        assert all(one.failure is None for one in played(engine, group_size=2))
    with engine_of("words", 0, "Unsaved") as engine, pytest.raises(RecipeError, match="the instruction is"):
        played(engine, group_size=2)


def test_numbers_of_failed_episodes_are_not_checked() -> None:
    line = Line(2)
    line.reset([0, 1], [{}, {}], [1, 2])
    steps = line.step([0, 1], np.zeros((2, CHUNK, 1), np.float32))
    steps.num_steps[0] = 0
    with pytest.raises(ValueError, match="num_steps"):
        check_steps(line.spaces, steps, 2, CHUNK)
    check_steps(line.spaces, replace(steps, infos=({"failed": "it stands still"}, {})), 2, CHUNK)


def test_all_numbers_that_are_not_finite_are_found() -> None:
    state = np.array([[0.0, np.inf], [0.0, 0.0], [np.nan, 0.0]], np.float32)
    rewards = np.array([[np.nan], [0.0], [0.0]], np.float32)
    found = not_finite([7, 8, 9], Observations({}, state, ("",) * 3), rewards)
    assert found == {
        7: "number 1 of the state is inf in environment 7",
        9: "number 0 of the state is nan in environment 9",
    }


def test_checks_cost_little_next_to_a_step() -> None:
    table, num = TableTask(64), 64
    which = list(range(num))
    table.reset(which, [{}] * num, which)
    actions = np.zeros((num, 4, 2), np.float32)

    def seconds(repeat: int, checks: bool) -> float:
        begin = time.perf_counter()
        for _ in range(repeat):
            if checks:
                check_steps(table.spaces, steps, num, 4)
                not_finite(which, steps.observations, steps.rewards)
            else:
                table.step(which, actions)
        return (time.perf_counter() - begin) / repeat

    steps = table.step(which, actions)
    stepping, checking = (min(seconds(5, checks) for _ in range(5)) for checks in (False, True))
    assert checking < 0.5 * stepping, f"{checking * 1e6:.0f} us next to {stepping * 1e6:.0f} us"
