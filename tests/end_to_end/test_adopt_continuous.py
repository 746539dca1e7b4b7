"""A run that generates continuously goes on under another plan as if it had been stopped and resumed with it."""

from __future__ import annotations

import json

import pytest
from tests.distributed.ranks import RankError, RankPool
from tests.loops import PROMPTS, RESPONSES, Kill, Runs, Seen, assert_same, beside, iterations, numbers

CHANNEL = {"capacity": 2, "mode": "continuous"}
STEPS = 7
SWITCHES = {2: "other", 3: "other", 4: "layout"}
"""Names of layouts, by step: a run that is killed in a switch has the checkpoint of that step, or of one before."""


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


@pytest.mark.parametrize("kill", [("before", 0), ("during", 2), ("after", 1)])
def test_a_run_that_is_killed_around_a_switch_loses_nothing(runs: Runs, kill: Kill) -> None:
    name, schedule = kill[0], {"replan_every_steps": 1, "layouts": {"other": beside(1, 2)}}
    scheduled = {"schedule": schedule, "checkpoint.every_steps": 1}
    with pytest.raises(RankError):
        runs(2, 1, CHANNEL, name, None, STEPS, SWITCHES, kill, **scheduled)
    after = runs(2, 1, CHANNEL, name, None, STEPS, SWITCHES, **scheduled)
    again = runs(2, 1, CHANNEL, f"{name}-again", None, STEPS, **scheduled, **{"run.follow": name})
    first = min(after.trained)
    assert first > 1
    assert_same(Seen({step: rows for step, rows in again.trained.items() if step >= first}, again.weights), after)
    assert_all_trained_once(again)
    assert layouts(runs, name)[0]["layout"] == layouts(runs, name)[2]["layout"] != layouts(runs, name)[1]["layout"]
    assert layouts(runs, f"{name}-again") == layouts(runs, name)
    log = [json.loads(line)["step"] for line in (runs.directory(name).path / "metrics-rollout.jsonl").open()]
    assert log == list(range(1, STEPS + 1)), "whoever writes it, the log has each iteration once"
