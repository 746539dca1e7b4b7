"""Runs whose ranks generate ahead take on other layouts, and are killed meanwhile, and lose nothing."""

from __future__ import annotations

import json

import pytest
from tests.distributed.ranks import RankError, RankPool
from tests.loops import PROMPTS, RESPONSES, SLOW, Kill, Runs, Seen, assert_same, beside, iterations, numbers

CHANNEL = {"capacity": 2, "mode": "continuous"}
KILLS: list[Kill] = [("before", 0), ("during", 2), ("after", 1)]
EVERY_STEP = {"checkpoint.every_steps": 1, "checkpoint.asynchronous": False}
STEPS, FEW_STEPS = 7, 5
SWITCHES = {2: "other", 3: "other", 4: "layout", 5: "layout"}
"""Names of layouts, by step: a run that is killed in a switch continues behind it, and switches in the next step."""


def in_short_form(chosen: int) -> list[object]:
    """All kills, of which all but one are for the thorough form."""
    marks = pytest.mark.thorough
    return [kill if n == chosen else pytest.param(kill, marks=marks) for n, kill in enumerate(KILLS)]


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Trains in one folder for all tests."""
    return Runs(ranks, tmp_path_factory.mktemp("adopt"))


def layouts(runs: Runs, name: str) -> list[dict[str, object]]:
    return iterations(runs.directory(name), "layouts.jsonl")


def assert_all_trained_once(seen: Seen) -> None:
    rows = [row for samples in seen.trained.values() for row in samples]
    assert len(rows) == len({*rows}) == STEPS * PROMPTS * RESPONSES


def test_a_switch_is_like_stopping_and_resuming_with_the_other_layout(runs: Runs) -> None:
    channel = {**CHANNEL, "stragglers": "defer", "max_staleness": 6}
    stopped = runs(2, 1, channel, "resumed", ("rollout", 3), STEPS)
    resumed = runs(1, 2, channel, "resumed", steps=STEPS)
    (_, switch) = layouts(runs, "resumed")
    assert switch["made"] > switch["iteration"], "there were rows in flight"  # type: ignore[operator]
    switched = runs(2, 1, channel, "switched", steps=STEPS, **{"run.follow": "resumed"})
    assert layouts(runs, "switched") == layouts(runs, "resumed"), "the run that follows does not stop: it switches"
    assert_same(switched, Seen(stopped.trained | resumed.trained, resumed.weights))
    assert_all_trained_once(switched)
    assert numbers(runs.directory("switched")) == numbers(runs.directory("resumed"))


def test_a_rank_that_is_behind_others_gives_up_what_it_is_in_the_middle_of_and_keeps_its_engine(runs: Runs) -> None:
    other = {**beside(2, 2), "policy": {"ranks": "2-3", "groups": "whole"}}
    schedule = {"schedule": {"replan_every_steps": 1, "layouts": {"other": other}}}
    switched = runs(2, 2, CHANNEL, f"{SLOW}-switched", None, 4, {1: "other"}, **schedule)
    again = runs(2, 2, CHANNEL, "again", None, 4, **schedule, **{"run.follow": f"{SLOW}-switched"})
    assert_same(again, switched)
    assert layouts(runs, "again") == layouts(runs, f"{SLOW}-switched")


def test_layouts_are_found_by_the_seconds_of_ranks_that_generate_continuously(runs: Runs) -> None:
    """The planner searches, by what is measured; only the choice does not depend on it."""
    schedule = {"schedule": {"replan_every_steps": 5, "layouts": "auto"}}
    found = "rollout on 0-1; reward, old, advantage, samples, policy on 2"
    runs(1, 2, {**CHANNEL, "capacity": 1}, "found", steps=STEPS, switches={5: found}, **schedule)
    events = [json.loads(line) for line in runs.directory("found").events.open()]
    (event,) = [one for one in events if one["event"] == "switch"]
    assert (event["step"], event["to"]) == (5, found)
    assert min(event["now_s"], event["expected_s"]) > 0


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Seen:
    """A run with a fixed lag that keeps its layout."""
    return runs(2, 1, 1, "undisturbed", steps=FEW_STEPS)


@pytest.mark.parametrize("kill", in_short_form(0))
def test_a_run_with_a_fixed_lag_that_is_killed_around_a_switch_is_resumed_exactly(
    runs: Runs, undisturbed: Seen, kill: Kill
) -> None:
    moved = {"rollout": {"ranks": "1-2"}, "reward": {"ranks": "0"}, "policy": {"ranks": "0"}}
    schedule = {"replan_every_steps": 1, "layouts": {"other": moved}}
    scheduled = {"schedule": schedule, **EVERY_STEP}
    name = f"lag-{kill[0]}"
    with pytest.raises(RankError):
        runs(2, 1, 1, name, None, FEW_STEPS, {2: "other"}, kill, **scheduled)
    after = runs(2, 1, 1, name, None, FEW_STEPS, {2: "other"}, **scheduled)
    first = min(after.trained)
    assert first == (4 if kill[0] == "after" else 2), "it continues from the checkpoint of the step before"
    rest = {step: rows for step, rows in undisturbed.trained.items() if step >= first}
    assert_same(after, Seen(rest, undisturbed.weights))
    lines = iterations(runs.directory(name), "rollout-to-reward.jsonl")
    assert [line["iteration"] for line in lines] == list(range(1, FEW_STEPS + 1))


@pytest.mark.parametrize("kill", in_short_form(1))
def test_a_continuous_run_that_is_killed_around_a_switch_loses_nothing(runs: Runs, kill: Kill) -> None:
    name, schedule = kill[0], {"replan_every_steps": 1, "layouts": {"other": beside(1, 2)}}
    scheduled = {"schedule": schedule, **EVERY_STEP}
    with pytest.raises(RankError):
        runs(2, 1, CHANNEL, name, None, STEPS, SWITCHES, kill, **scheduled)
    after = runs(2, 1, CHANNEL, name, None, STEPS, SWITCHES, **scheduled)
    again = runs(2, 1, CHANNEL, f"{name}-again", None, STEPS, **scheduled, **{"run.follow": name})
    first = min(after.trained)
    assert first == (5 if name == "after" else 3), "it continues from the checkpoint of the step before"
    assert_same(Seen({step: rows for step, rows in again.trained.items() if step >= first}, again.weights), after)
    assert_all_trained_once(again)
    assert layouts(runs, name)[0]["layout"] == layouts(runs, name)[2]["layout"] != layouts(runs, name)[1]["layout"]
    assert layouts(runs, f"{name}-again") == layouts(runs, name)
    log = [json.loads(line)["step"] for line in (runs.directory(name).path / "metrics-rollout.jsonl").open()]
    assert log == list(range(1, STEPS + 1)), "whoever writes it, the log has each iteration once"
