"""Isaac Lab as an environment of bodies, with a stand-in for it; it has not been run with the real one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
from tests.unit.embodied import isaac

from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators import conformance
from leaderless.embodied.simulators.isaaclab_tasks import IsaacLab, _library
from leaderless.embodied.simulators.protocol import check_steps
from leaderless.embodied.simulators.registry import open_body


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    _library.cache_clear()
    yield isaac.installed(monkeypatch)
    _library.cache_clear()


def made(num: int, **options: object) -> IsaacLab:
    return IsaacLab(num, device="cpu", **options)  # type: ignore[arg-type]


# Others are about episodes that step without their neighbors, or that are saved.
@pytest.mark.parametrize(
    "check", ["spaces_hold", "same_start", "seeds_differ", "rows_follow_the_order", "chunks_equal_single_steps"]
)
def test_rules_hold_as_far_as_all_episodes_step_together(check: str, launched: list[str]) -> None:
    getattr(conformance, check)(made)
    assert launched == ["headless=True"], "once in a process"


def test_what_is_seen_last_is_not_the_next_start(launched: list[str]) -> None:
    assert not launched
    world = made(3)
    start = world.reset([0, 1, 2], [{}] * 3, [5, 6, 5])
    assert (start.state[0] == start.state[2]).all()
    assert start.state[0, 0] != start.state[1, 0]
    pushes = np.array([1.0, 0.0, 0.25], np.float32)[:, None, None].repeat(8, 1)
    steps = world.step([0, 1, 2], pushes)
    check_steps(world.spaces, steps, 3, 8)
    number = int(np.ceil((1 - start.state[0, 0]) / 0.4))
    assert steps.num_steps.tolist() == [number, isaac.STEPS, isaac.STEPS]
    assert steps.terminated.tolist() == [True, False, steps.terminated[2]]
    assert steps.success.tolist() == steps.terminated.tolist()
    assert steps.truncated.tolist() == (~steps.terminated).tolist()
    np.testing.assert_allclose(steps.observations.state[0], [start.state[0, 0] + 0.4 * number, number], rtol=1e-5)
    np.testing.assert_allclose(steps.observations.state[1], [start.state[1, 0], isaac.STEPS], rtol=1e-5)
    np.testing.assert_allclose(steps.rewards[0, number - 1], start.state[0, 0] + 0.4 * number, rtol=1e-5)
    assert world._world.num_resets == 3, "only those that were asked for"


def test_some_begin_while_others_continue(launched: list[str]) -> None:
    assert not launched
    world = made(2)
    world.reset([0, 1], [{}] * 2, [5, 6])
    before = world.step([0, 1], np.full((2, 2, 1), 0.1, np.float32)).observations.state
    world.reset([1], [{}], [7])
    after = world.step([0, 1], np.zeros((2, 1, 1), np.float32)).observations.state
    np.testing.assert_allclose(after[0], before[0] + [0, 1], rtol=1e-6)
    assert after[1, 1] == 1


def test_episodes_that_others_have_moved_are_not_continued(launched: list[str]) -> None:
    assert not launched
    world = made(2)
    world.reset([0, 1], [{}] * 2, [5, 6])
    world.step([0], np.zeros((1, 1, 1), np.float32))
    with pytest.raises(RuntimeError, match=r"episodes \[1\] are over, or were moved .* set body.processes to 0"):
        world.step([0, 1], np.zeros((2, 1, 1), np.float32))
    world.reset([1], [{}], [6])
    world.step([0, 1], np.zeros((2, 1, 1), np.float32))


def test_it_is_opened_by_its_name_and_closed_once(launched: list[str]) -> None:
    config = BodyConfig(type="isaaclab", options={"device": "cpu", "instruction": "reach", "action_limit": 2.0})
    world = open_body(config, 2)
    assert isinstance(world, IsaacLab)
    assert (world.spaces.state_size, world.spaces.max_steps, world.spaces.has_instructions) == (2, isaac.STEPS, True)
    assert world.spaces.actions.high == (2.0,)  # type: ignore[union-attr]
    assert world.repeats_starts
    assert not world._world.cfg.observations.policy.enable_corruption
    world.close()
    world.close()
    assert world._world.num_closed == 1
    assert launched == ["headless=True"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "Isaac-Missing-v0"}, "Isaac Lab does not make 'Isaac-Missing-v0'"),
        (
            {"id": "Isaac-Lift-v0", "success": "lifted"},
            "success='lifted': 'Isaac-Lift-v0' has the terminations time_out",
        ),
        ({"id": "Isaac-History-v0"}, "shows several steps at once"),
        ({"action_limit": 0}, "action_limit=0"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, object], message: str, launched: list[str]) -> None:
    assert not launched
    with pytest.raises(RecipeError, match=message):
        open_body(BodyConfig(type="isaaclab", options={"device": "cpu", **options}), 1)  # type: ignore[arg-type]


def test_without_isaac_lab_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _library.cache_clear()
    monkeypatch.setitem(sys.modules, "isaaclab", None)
    monkeypatch.setitem(sys.modules, "isaaclab.app", None)
    with pytest.raises(RecipeError, match="install Isaac Lab 2 with Isaac Sim"):
        open_body(BodyConfig(type="isaaclab"), 1)
