"""The choice among layouts is a pure function of measured seconds."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import cast
from unittest.mock import patch

import pytest
from tests.end_to_end.two_judges import layout, workflow
from tests.unit.recipes import continuous, make_recipe, only_problem, plan_of

from leaderless.config import RecipeError
from leaderless.config.layout import ScheduleConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner.placement.replanning import (
    Links,
    NodeSeconds,
    alternatives,
    check_adoptable,
    check_exchangeable,
    choose,
    lost_seconds,
    step_seconds,
)
from leaderless.worker.replan.replanner import Replanner

SCHEDULE = {"replan_every_steps": 1, "layouts": {"apart": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}}}


def seconds_of(**known: Mapping[int, float]) -> dict[str, NodeSeconds]:
    return {name: NodeSeconds(dict(values)) for name, values in known.items()}


def test_seconds_follow_from_what_has_been_measured() -> None:
    node = NodeSeconds()
    assert node.on(2) == 0.0, "nothing is known"
    node.measure(2, 6.0)
    assert (node.on(1), node.on(2), node.on(4)) == (12.0, 6.0, 3.0), "ranks share the work"
    node.measure(4, 4.0)
    assert node.on(4) == 4.0
    assert node.on(1) == pytest.approx(10.0), "each rank has 2 s, and they share 8 s"
    assert node.on(8) == pytest.approx(3.0)
    node.measure(4, 8.0)
    assert (node.on(2), node.on(4)) == (12.0, 8.0), "a node that has become slow is so on any ranks"
    node.known = {1: 1.0, 2: 2.0}
    assert node.on(4) == 2.0, "more ranks are never expected to take longer"


def test_a_slow_network_explains_seconds_on_a_number_of_ranks_that_is_new() -> None:
    node = NodeSeconds()
    node.measure(2, 6.0)
    node.measure(3, 10.0, 2.0)
    assert node.on(3) == pytest.approx(4.0), "as expected, but for the network"
    assert (node.on(2), node.on(2, 2.0)) == (6.0, 12.0)
    node.measure(2, 6.3)
    assert node.num_bytes == 3.0, "not on ranks with a quick one"
    node.measure(3, 4.2)
    assert node.on(3, 2.0) == pytest.approx(4.2 + 2 * 3), "it is quick again"


def test_nodes_on_other_ranks_work_at_the_same_time() -> None:
    seconds = seconds_of(rollout={3: 1.0}, first={1: 4.0}, second={2: 5.0}, policy={3: 2.0})
    plan = plan_of(workflow(), 3, layout=layout("0", "1-2"))
    assert step_seconds(plan, seconds) == pytest.approx(1 + 5 + 2)
    other = plan_of(workflow(), 3, layout=layout("0-1", "2"))
    assert step_seconds(other, seconds) == pytest.approx(1 + 10 + 2)
    together = plan_of(workflow(), 3)
    assert step_seconds(together, seconds) == pytest.approx(1 + (4 + 10) / 3 + 2)


def test_windows_travel_while_ranks_work() -> None:
    apart = {"rollout": {"ranks": "0"}, "reference": {"ranks": "1"}, "policy": {"ranks": "1"}}
    seconds = seconds_of(rollout={1: 8.0}, reference={1: 4.0}, policy={1: 1.0})
    sections = {"layout": apart, "algorithm": {"kl": {"coefficient": 0.1}}}
    whole = plan_of("grpo", 2, **sections)
    assert step_seconds(whole, seconds) == pytest.approx(8 + 4 + 1)
    windows = plan_of("grpo", 2, **sections, batch={"windows_per_step": 4, "prompts_per_step": 8})
    assert step_seconds(windows, seconds) == pytest.approx(8 + 1 + 1), "the last window is scored after the rollout"


@pytest.mark.parametrize(
    ("expected", "switch_s", "left", "chosen", "is_worth_it"),
    [
        ({"layout": 2.0, "a": 1.0, "b": 1.5}, 10.0, 50, "a", True),
        ({"layout": 2.0, "a": 2.0}, 0.0, 50, "layout", False),
        ({"layout": 2.0, "a": 1.9}, 0.0, 50, "a", False),  # less than a tenth
        ({"layout": 2.0, "a": 1.0}, 10.0, 19, "a", False),  # too few steps are left
        ({"layout": 2.0, "a": 1.0}, 10.0, 20, "a", True),
        ({"layout": 2.0, "a": 1.0}, 30.0, 1000, "a", False),  # savings count for 50 steps
    ],
)
def test_another_layout_must_be_faster_by_enough_and_pay_for_the_switch(
    expected: Mapping[str, float], switch_s: float, left: int, chosen: str, *, is_worth_it: bool
) -> None:
    config = ScheduleConfig.model_validate(SCHEDULE)
    choice = choose(expected, "layout", switch_s, left, config)
    assert (choice.name, choice.is_worth_it) == (chosen, is_worth_it)
    assert choice.gain == pytest.approx(1 - expected[chosen] / 2.0)


def test_all_layouts_are_planned_before_a_run_begins() -> None:
    recipe = make_recipe(schedule=SCHEDULE)
    plans = alternatives(recipe, plan_of("grpo", 2, schedule=SCHEDULE))
    assert list(plans) == ["layout", "apart"]
    assert plans["layout"]["rollout"].layout.ranks == (0, 1)
    assert plans["apart"]["policy"].layout.ranks == (1,)
    with pytest.raises(RecipeError) as caught:
        alternatives(recipe, plan_of("grpo", 1, schedule=SCHEDULE))
    problem = only_problem(caught.value)
    assert problem.key == "schedule.layouts.apart.policy.ranks"
    assert "names rank 1" in problem.message


def test_a_loop_that_goes_ahead_is_as_slow_as_the_slower_of_the_two() -> None:
    apart = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1-2"}}
    ahead = plan_of("grpo", 3, layout=apart, channels={"rollout": {"capacity": 1}})
    seconds = seconds_of(rollout={1: 8.0}, policy={2: 3.0})
    assert step_seconds(ahead, seconds) == pytest.approx(8)
    assert step_seconds(ahead, seconds, {"rollout": 1.0, ahead.loops[1].name: 7.0}) == pytest.approx(10)


def test_the_network_is_tested_when_steps_take_another_time_and_once_with_each_layout() -> None:
    replanner = Replanner.__new__(Replanner)
    replanner._world, replanner._links, replanner._num_looks_at_slow = cast("ProcessGroup", None), Links(), 0
    replanner._steps, tests = deque(), list[float]()

    def tested(seconds: float) -> int:
        replanner._test_links([seconds])
        return len(tests)

    with patch("leaderless.worker.replan.replanner.find_slow_links", lambda _: tests.append(0.0) or Links()):
        replanner.forget_steps()
        assert [tested(seconds) for seconds in (1.0, 1.1, 1.5)] == [1, 1, 2]
        replanner.forget_steps()
        assert tested(1.5) == 3


def test_a_switch_costs_what_continuous_ranks_generate_again() -> None:
    assert lost_seconds(continuous("0-1", "2-3"), {"rollout": 3.0, "advantage": 9.0}) == 3.0
    assert lost_seconds(continuous("0-1", "2-3", mode="fixed_lag"), {"rollout": 3.0, "advantage": 9.0}) == 0.0


def test_only_layouts_with_the_same_channels_replace_one_with_rows_in_flight() -> None:
    apart = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}
    channels = {"rollout": {"capacity": 1}}
    moved = {"rollout": {"ranks": "1"}, "policy": {"ranks": "0"}}
    schedule = {"replan_every_steps": 1, "layouts": {"moved": moved}}
    recipe = make_recipe(schedule=schedule, channels=channels, layout=apart)
    ahead = plan_of("grpo", 2, layout=apart, channels=channels)
    assert [loop.ranks for loop in alternatives(recipe, ahead)["moved"].loops] == [(1,), (0,)]
    with pytest.raises(RecipeError, match="sends other columns through channels"):
        check_adoptable(recipe, ahead, plan_of("grpo", 2, layout={"policy": {"ranks": "0-1"}}))


def test_stages_of_a_pipeline_stay_where_they_are() -> None:
    plans = [plan_of("grpo", 4, layout={"policy": {"pp": pp}}) for pp in (1, 2, 4)]
    for old, new in ((0, 1), (1, 0), (1, 2)):
        with pytest.raises(RecipeError, match="the stages of 'policy' cannot change while the run goes on: stop"):
            check_adoptable(make_recipe(), plans[old], plans[new])
    check_adoptable(make_recipe(), plans[1], plan_of("grpo", 4, layout={"policy": {"pp": 2}, "reward": {"ranks": "0"}}))


def test_continuous_generation_is_divided_otherwise_only_where_every_rank_keeps_its_number_of_groups() -> None:
    recipe, now = make_recipe(), continuous("0-1", "2-3", "defer")
    check_adoptable(recipe, now, continuous("2-3", "0-1", "defer"))
    check_adoptable(recipe, now, continuous("0", "1-3", "defer"))
    check_exchangeable(recipe, continuous("0-1", "2-3"), continuous("0-2", "3"))
    with pytest.raises(RecipeError, match="has 2 ranks that generate, where 1 did"):
        check_exchangeable(recipe, now, continuous("0", "1-3", "defer"))
    with pytest.raises(RecipeError, match=r"has 3 ranks that generate, where 2 did.* or set stragglers to wait"):
        check_adoptable(recipe, now, continuous("0-2", "3", "defer"))
    for other in (continuous("0-1", "2-3"), continuous("0-1", "2-3", mode="fixed_lag")):
        with pytest.raises(RecipeError, match="sends other columns through channels"):
            check_adoptable(recipe, now, other)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"schedule": {"layouts": {"a": {}}}}, "replan_every_steps must be at least 1"),
        ({"schedule": {"replan_every_steps": 1, "layouts": {"layout": {}}}}, "must have another name"),
        ({"schedule": SCHEDULE, "online": {}, "data": {}}, "must be 0 with `online`"),
    ],
)
def test_a_schedule_without_a_choice_is_refused(sections: Mapping[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make_recipe(**sections)
