"""A run that runs out of memory continues with smaller micro-batches, and arrives at the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_recipe
from torch import Tensor, nn

from leaderless.distributed.errors import MemoryExhausted
from leaderless.observability.console import Display
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.failure import WorkerFailure
from leaderless.worker.supervision.settled_memory import read_limits

AUTO = "batch.micro_batch_tokens=auto"
REWARD = {"format": {"pattern": r".*\d.*"}}
PPO: dict[str, object] = {"workflow": "ppo", "batch.updates_per_step": 2, "reward": REWARD, "steps": 1}


def fail_once(model: nn.Module, at_call: int) -> None:
    """Let memory run out in one of the passes that have a gradient, after other passes have accumulated theirs."""
    num_calls = 0

    def refuse(*_: object) -> None:
        nonlocal num_calls
        num_calls += torch.is_grad_enabled()
        if num_calls == at_call:
            num_calls += 1
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    model.register_forward_pre_hook(refuse)


Outcome = tuple[dict[str, Tensor], list[dict[str, float]], dict[str, int], WorkerFailure | None]
"""Weights, metrics, bounds by role, and how the worker failed."""


def train(recipe_file: str, overrides: Sequence[str], bounds: dict[str, int], failing: dict[str, int]) -> Outcome:
    """Be one worker of a run.

    Args:
        bounds: Tokens of one pass to begin with, by role.
        failing: Roles whose memory runs out, and in which pass.
    """
    recipe = load_recipe(recipe_file, overrides).recipe
    place = RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    numbers: list[dict[str, float]] = []
    try:
        with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
            trained = worker.parts.roles.trained()
            for role, engine in trained.items():
                engine.micro_batch_tokens = bounds.get(role, engine.micro_batch_tokens)
                if role in failing:
                    fail_once(engine.model, failing[role])
            numbers += [worker.run_step() for _ in range(recipe.steps)]
            weights = {f"{r}.{n}": w.clone() for r, e in trained.items() for n, w in e.full_weights()}
            return weights, numbers, {role: engine.micro_batch_tokens for role, engine in trained.items()}, None
    except MemoryExhausted as error:
        return {}, numbers, {}, WorkerFailure.of(error, place.rank)


def without_clock(numbers: dict[str, float]) -> dict[str, float]:
    clocks = ("time", "seconds/", "sent/", "throughput", "rollout/tokens_per_s")
    return {name: value for name, value in numbers.items() if not name.startswith(clocks)}


def test_weights_and_metrics_are_those_of_a_bound_that_was_low_from_the_start(ranks: RankPool, tmp_path: Path) -> None:
    # Groups so small that the lower bound splits none: a lone sample is computed with its prompt, in another order.
    sizes = {"batch.micro_batch_tokens": 100, "batch.prompts_per_step": 16, "batch.responses_per_prompt": 2}
    recipe = str(write_recipe(tmp_path, tiny_model(), PPO | sizes))
    auto = [AUTO, "name=auto"]
    first = {"policy": 64, "critic": 64}
    ((weights, numbers, bounds, _),) = ranks.run(
        1, train, recipe, auto, first, {"policy": 2, "critic": 2}, init_group=False
    )
    assert all(18 <= bound <= 32 for bound in bounds.values()), "both have been lowered"
    ((expected, wanted, _, _),) = ranks.run(1, train, recipe, ["name=low"], bounds, {}, init_group=False)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert [without_clock(one) for one in numbers] == [without_clock(one) for one in wanted]
    ((_, _, again, _),) = ranks.run(1, train, recipe, auto, {}, {}, init_group=False)
    assert again == bounds, "kept for the next start"


@pytest.mark.parametrize(("world_size", "settings"), [(2, {}), (1, {"compute_dtype": "bfloat16"})])
def test_where_a_pass_cannot_be_begun_anew_the_next_start_does_with_less(
    ranks: RankPool, tmp_path: Path, world_size: int, settings: dict[str, object]
) -> None:
    model = {"models.policy": {"path": tiny_model(), **settings}, "steps": 1}
    recipe = str(write_recipe(tmp_path, tiny_model(), model))
    results = ranks.run(world_size, train, recipe, [AUTO], {"policy": 64}, {"policy": 2}, init_group=False)
    limits = read_limits(RunDirectory(tmp_path / "runs/tiny"))
    assert limits["policy"] <= 32
    for rank, (*_, failure) in enumerate(results):
        assert failure is not None
        assert failure.kind == "out_of_memory"
        assert f"rank {rank}: a micro-batch of " in failure.message
        assert f"(at step 1, in policy, on rank {rank})" in failure.message
        assert "is lowered to" in failure.message
    results = ranks.run(world_size, train, recipe, [AUTO], {}, {}, init_group=False)
    assert [bounds for _, _, bounds, _ in results] == [limits] * world_size
