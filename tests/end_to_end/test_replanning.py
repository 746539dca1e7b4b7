"""A run whose stages change their speed takes on the layout that suits them, and trains on the same samples."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.two_judges import SLOW_FROM, layout
from tests.tiny import tiny_model, write_recipe

from leaderless.observability.console import Display
from leaderless.run.planned import plan_training
from leaderless.worker.place import Place
from leaderless.worker.process import open_worker
from leaderless.workflow import load_recipe

NUM_STEPS, WITHIN = 11, 5
"""Steps of a run, and those after a change in which most of what can be gained must be gained."""
EVEN, ODD = layout("0", "1-2"), layout("0-1", "2")


def train(recipe_file: str, overrides: list[str]) -> list[dict[str, float]]:
    """Be one worker of a run; returns the numbers of each step."""
    place, steps = Place.from_environment(), list[dict[str, float]]()
    planned = plan_training(load_recipe(recipe_file, overrides), place.world_size)
    with open_worker(planned.recipe, planned.plan, place, Display(Console(), is_shown=False)) as worker:
        run_step = worker.run_step
        worker.run_step = lambda: steps.append(run_step()) or steps[-1]  # type: ignore[method-assign, func-returns-value]
        worker.run()
    return steps


def test_after_a_stage_has_become_slow_its_ranks_are_others_within_five_steps(ranks: RankPool, tmp_path: Path) -> None:
    changes = {
        "workflow": "tests.end_to_end.two_judges:workflow",
        "reward": {"format": {"pattern": r".*\d.*"}},
        "layout": EVEN,
        "checkpoint.every_steps": 0,
        "steps": NUM_STEPS,
    }
    fixed = str(write_recipe(tmp_path, tiny_model(), changes))
    quick = ranks.run(3, train, fixed, ["name=quick"], init_group=False)[0]
    suited = ["name=suited", f"layout={json.dumps(ODD)}", f"steps={SLOW_FROM + 4}"]
    best = ranks.run(3, train, fixed, suited, init_group=False)[0]
    schedule = {"replan_every_steps": 1, "layouts": {"odd": ODD}}
    planning = str(write_recipe(tmp_path, tiny_model(), changes | {"schedule": schedule}))
    steps = ranks.run(3, train, planning, ["name=planned"], init_group=False)[0]
    # The quickest steps, and half of what a benchmark would ask for: other processes use the same cores.
    took = min(one["time/step"] for one in steps[SLOW_FROM + WITHIN - 1 :])
    optimum = min(one["time/step"] for one in best[SLOW_FROM - 1 :])
    lost = steps[SLOW_FROM - 1]["time/step"]
    assert lost - took >= (lost - optimum) / 2, f"{took:.3g} s, where {optimum:.3g} s are possible"
    assert optimum / lost < 0.8, "another layout is much better"
    assert [one["policy/loss"] for one in steps] == [one["policy/loss"] for one in quick]
    assert [one["policy/grad_norm"] for one in steps] == [one["policy/grad_norm"] for one in quick]
    assert steps[SLOW_FROM - 2]["schedule/switches"] == 0, "nothing changes without a reason"
    assert steps[-1]["schedule/switches"] == 1
    (event,) = [json.loads(line) for line in (tmp_path / "runs/planned/events.jsonl").read_text().splitlines()]
    assert (event["event"], event["from"], event["to"]) == ("switch", "layout", "odd")
    assert event["step"] - SLOW_FROM < WITHIN
