"""A run whose stages change their speed takes on the layout that suits them, and trains on the same samples."""

from __future__ import annotations

import json
import time
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.two_judges import CLOCK, SECONDS, SLOW_FROM, layout
from tests.tiny import tiny_model, write_recipe

from leaderless.observability.console import Display
from leaderless.planner.workflow import load_recipe
from leaderless.run.planned_run import plan_training
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo

NUM_STEPS, NUM_SAMPLES = 9, 24
EVEN, ODD = layout("0", "1-2"), layout("0-1", "2")


def train(recipe_file: str, overrides: list[str]) -> list[dict[str, float]]:
    """Be one worker of a run, by the judges' clock; returns the numbers of each step."""
    place, steps = RankInfo.from_environment(), list[dict[str, float]]()
    planned = plan_training(load_recipe(recipe_file, overrides), place.world_size)
    display = Display(Console(), is_shown=False)
    with patch.object(time, "perf_counter", CLOCK), open_worker(planned.recipe, planned.plan, place, display) as worker:
        run_step = worker.run_step
        worker.run_step = lambda: steps.append(run_step()) or steps[-1]  # type: ignore[method-assign, func-returns-value]
        worker.run()
    return steps


def test_after_two_steps_with_a_slow_stage_its_ranks_are_others(ranks: RankPool, tmp_path: Path) -> None:
    changes = {
        "workflow": "tests.end_to_end.two_judges:workflow",
        "reward": {"format": {"pattern": r".*\d.*"}},
        "layout": EVEN,
        "checkpoint.every_steps": 0,
        "steps": NUM_STEPS,
    }
    fixed = str(write_recipe(tmp_path, tiny_model(num_layers=1), changes))
    quick = ranks.run(3, train, fixed, ["name=quick"], init_group=False)[0]
    schedule = {"replan_every_steps": 1, "layouts": {"odd": ODD}}
    planning = str(write_recipe(tmp_path, tiny_model(num_layers=1), changes | {"schedule": schedule}))
    steps = ranks.run(3, train, planning, ["name=planned"], init_group=False)[0]
    slow = pytest.approx(2 * SECONDS * NUM_SAMPLES, rel=0.01)
    assert [one["time/first"] for one in steps[SLOW_FROM - 1 : SLOW_FROM + 1]] == [slow, slow]
    assert [one["schedule/switches"] for one in steps] == [0] * (SLOW_FROM + 1) + [1] * 3, "two of three were slow"
    balanced = pytest.approx(SECONDS * NUM_SAMPLES, rel=0.01)
    assert [(one["time/first"], one["time/second"]) for one in steps[SLOW_FROM + 1 :]] == [(balanced, balanced)] * 3
    assert [one["policy/loss"] for one in steps] == [one["policy/loss"] for one in quick]
    assert [one["policy/grad_norm"] for one in steps] == [one["policy/grad_norm"] for one in quick]
    (event,) = [json.loads(line) for line in (tmp_path / "runs/planned/events.jsonl").read_text().splitlines()]
    assert (event["event"], event["from"], event["to"]) == ("switch", "layout", "odd")
    assert event["step"] == SLOW_FROM + 1
