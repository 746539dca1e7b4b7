"""The contract of every stage, built-in or a user's `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.end_to_end.own_code import OWN_WORKFLOW
from tests.episodes import EPISODES_WORKFLOW
from tests.small_bodies import body_recipe
from tests.tiny import tiny_model, tiny_recipe

from leaderless.config import Recipe
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.observability.console import Display
from leaderless.planner import Cluster, PlannedNode, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.planner.workflow.builtin_stages import BUILTIN_STAGES
from leaderless.planner.workflow.stage_spec import STAGES
from leaderless.stages.context import StageContext
from leaderless.worker.build.process import open_worker
from leaderless.worker.chain import StageFunction
from leaderless.worker.rank_info import RankInfo

OWN = ("tests.end_to_end.own_code:bonus_for_even_sums", "tests.end_to_end.failing:fail")
WORKFLOWS: dict[str, dict[str, object]] = {
    "grpo": {"algorithm.kl.coefficient": 0.1, "batch.updates_per_step": 2},
    "dapo": {"algorithm.repeat.max_rounds": 8},
    "ppo": {"models.critic": tiny_model()},
    "remax": {},
    "sft": {"data.train.response": "answer", "data.max_response_tokens": 4, "reward": {}},
    "dpo": {
        "data.train.chosen": "answer",
        "data.train.rejected": "question",
        "data.max_response_tokens": 8,
        "reward": {},
    },
    "reward_model": {
        "models": {"reward_model": tiny_model()},
        "data.train.chosen": "answer",
        "data.train.rejected": "question",
        "data.max_response_tokens": 8,
        "reward": {},
    },
    "rlhf": {"models": dict.fromkeys(("policy", "reward_model"), tiny_model()), "reward": {}},
    "gkd": {"models": dict.fromkeys(("policy", "reference"), tiny_model()), "algorithm.distillation": {"top_k": 3}},
    "happo": {
        "models": dict.fromkeys(("planner", "solver", "critic"), tiny_model()),
        "environment": {
            "type": "tests.unit.environments.test_play_on:Talk",
            "agents": {"planner": "planner", "solver": "solver"},
            "max_episode_tokens": 40,
        },
        "algorithm.kl.coefficient": 0.1,
    },
    "own.yaml": {},
    "episodes.yaml": {},
}
"""Recipes that together contain every built-in stage, and a user's."""
BODY_WORKFLOWS: dict[str, dict[str, object]] = {
    "ppo": {"algorithm": {"advantage": {"type": "body_gae"}}},
    "remax": {},
    "rloo": {"algorithm.kl.coefficient": 0.1},
    "reinforce_pp": {"algorithm.kl.coefficient": 0.1, "batch.responses_per_prompt": 1},
    "srpo": {},
    "imitation": {},
    "sac": {"models.policy.body": {"type": "squashed", "options": {}}, "algorithm.sac.first_decisions": 4},
}


def copied(column: Column) -> object:
    if isinstance(column, Jagged):
        return (column.values.clone(), column.lengths.clone())
    return column.clone() if isinstance(column, torch.Tensor) else column


def is_same(column: Column, before: object) -> bool:
    if isinstance(column, Jagged):
        return all(map(torch.equal, (column.values, column.lengths), before))  # type: ignore[call-overload]
    return torch.equal(column, before) if isinstance(column, torch.Tensor) else column == before  # type: ignore[arg-type]


def watched(node: PlannedNode, stage: StageFunction, seen: list[str]) -> StageFunction:
    """A stage whose contract is checked whenever it runs."""

    def run(batch: Batch, context: StageContext) -> Batch:
        seen.append(node.node.run)
        assert set(node.reads) <= set(batch.names()), "it is given what it reads"
        before = {name: copied(batch[name]) for name in batch.names()}
        result = stage(batch, context)
        changed = [name for name in batch.names() if not is_same(batch[name], before[name])]
        assert not changed, "others may read the rows that it is given"
        assert set(node.writes) <= set(result.names()), "it writes what it declares"
        assert set(result.names()) <= set(batch.names()) | set(node.writes), "and nothing else"
        ids, given = result.ids.tolist(), batch.ids.tolist()
        match node.spec.rows:
            case "same":
                assert ids == given
            case "filter":
                assert ids == [row for row in given if row in set(ids)]
            case "expand" | "extend":
                assert len(set(ids)) == len(ids) >= len(given)
        return result

    return run


@pytest.fixture
def alone() -> Iterator[RankInfo]:
    """The only worker of a run, in this process."""
    yield RankInfo.alone()
    if dist.is_initialized():
        dist.destroy_process_group()


def stages_of_a_step(recipe: Recipe, place: RankInfo) -> list[str]:
    plan, seen = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(1)), []
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        chain = worker.chain
        chain.stages = {name: watched(plan[name], stage, seen) for name, stage in chain.stages.items()}
        worker.run_step()
    return seen


def test_stages_keep_their_promises_in_a_step_of_each_workflow(tmp_path: Path, alone: RankInfo) -> None:
    seen = set()
    for number, (workflow, changes) in enumerate(WORKFLOWS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "own.yaml").write_text(OWN_WORKFLOW)
        (folder / "episodes.yaml").write_text(EPISODES_WORKFLOW)
        name = str(folder / workflow) if workflow.endswith(".yaml") else workflow
        digits = {"reward": {"format": {"pattern": r".*\d.*"}}}  # an untrained model earns it now and then
        settings = {"workflow": name, "run.recorded_prompts": 2, **digits, **changes}
        seen |= set(stages_of_a_step(tiny_recipe(folder, tiny_model(), settings).recipe, alone))
    for workflow, changes in BODY_WORKFLOWS.items():
        folder = tmp_path / workflow
        folder.mkdir()
        seen |= set(stages_of_a_step(body_recipe(folder, workflow=workflow, **changes), alone))
    assert seen >= {*BUILTIN_STAGES, OWN[0], "tests.episodes:play"}


@pytest.mark.parametrize("name", [*BUILTIN_STAGES, *OWN])
def test_a_stage_is_a_function_of_a_batch_and_a_context(name: str) -> None:
    place = BUILTIN_STAGES[name].implementation if name in BUILTIN_STAGES else name
    module, _, function = place.partition(":")
    stage = getattr(import_module(module), function)
    assert inspect.get_annotations(stage, eval_str=True) == {"batch": Batch, "context": StageContext, "return": Batch}
    spec = STAGES.find(name, "run", BUILTIN_STAGES)
    assert spec.implementation == place
    assert spec.summary or name in OWN, "what `leaderless plan` says of it"
