"""Nodes whose rows several ranks have: their metrics count each row once."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_recipe

from leaderless.data.batch import Batch
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.rewards.pool import Askers, Graded, RewardPool
from leaderless.rewards.protocol import RewardInput
from leaderless.stages.context import StageContext
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo


def fail_for_even_answers(
    _pool: RewardPool, inputs: Sequence[RewardInput], _sources: Sequence[str | None], askers: Askers
) -> list[Graded]:
    """Grade all responses except those to half of the prompts."""
    valid = [int(str(sample.answer)) % 2 == 1 for sample in inputs]
    return [Graded(float(len(sample.response)) * ok, ok, {}) for sample, ok in zip(inputs, valid, strict=True)]


def numbers_of_a_pipeline(recipe_file: str) -> dict[str, float]:
    """Numbers of a step whose rewards come from two stages, of which each reports names of its own."""
    recipe, place = (
        load_recipe(recipe_file, ["layout.policy.dp=2", "layout.reward.pp=2"]).recipe,
        RankInfo.from_environment(),
    )
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        stages = worker.chain.stages

        def reward(batch: Batch, context: StageContext) -> Batch:
            context.metrics.mean(f"stage/{context.process_group.rank}", 1.0, 1)
            return stages["reward"](batch, context)

        worker.chain.stages = {**stages, "reward": reward}
        return worker.run_step()


def numbers_of_a_step(recipe_file: str, overrides: list[str]) -> dict[str, float]:
    recipe, place = load_recipe(recipe_file, overrides).recipe, RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    display = Display(Console(), is_shown=False)
    with patch.object(RewardPool, "grade", fail_for_even_answers), open_worker(recipe, plan, place, display) as worker:
        return worker.run_step()


def test_a_row_that_several_ranks_hold_is_counted_once(tmp_path, ranks: RankPool) -> None:
    recipe = str(write_recipe(tmp_path, tiny_model(), {"run.reward_processes": 0}))
    (alone,) = ranks.run(1, numbers_of_a_step, recipe, ["name=alone"], timeout_s=120, init_group=False)
    layouts = {"reward": "tp", "advantage": "cp"}
    overrides = ["layout.policy.dp=2", *(f"layout.{node}.{kind}=2" for node, kind in layouts.items())]
    divided, _ = ranks.run(2, numbers_of_a_step, recipe, ["name=divided", *overrides], timeout_s=120, init_group=False)
    assert alone["reward/failed"] > 0
    counted = [name for name in alone if name.startswith(("reward", "group", "rollout/response"))]
    assert {"reward/failed", "reward/failed_share", "reward/mean", "group/no_signal"} <= set(counted)
    assert {name: divided[name] for name in counted} == pytest.approx({name: alone[name] for name in counted})


def test_stages_of_a_pipeline_may_report_other_names_and_the_last_one_counts(tmp_path, ranks: RankPool) -> None:
    recipe = str(write_recipe(tmp_path, tiny_model(), {"run.reward_processes": 0}))
    first, _ = ranks.run(2, numbers_of_a_pipeline, recipe, timeout_s=120, init_group=False)
    assert first["stage/1"] == 1.0
    assert "stage/0" not in first
