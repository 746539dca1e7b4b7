"""Decoupled PPO: the update of its recipe compared with the objective of the paper, written token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.tiny import random_samples
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import ProcessGroup
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.scoring import Entropy
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.stages.context import Grader, ModelRole, StageContext
from leaderless.stages.update import update
from leaderless.training.engine import TrainEngine, UpdateInfo
from leaderless.training.micro_batches import MicroBatch, make_micro_batches
from leaderless.workflow import load_recipe, resolve_workflow

RECIPE = Path(__file__).parents[2] / "recipes/quickstart/decoupled_ppo.yaml"
LENGTHS = [(2, 3), (1, 4), (3, 0), (2, 5)]
GROUP = ProcessGroup((0,), 0)
CLIP, HIGHEST = 0.2, 5.0
"""Bounds of the recipe."""


class Table:
    """A policy that has a log-probability for each token."""

    policy_version = 3

    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs.clone().requires_grad_()

    def micro_batches(self, batch: Batch) -> list[MicroBatch]:
        return make_micro_batches(batch, 8, GROUP)

    def forward(self, micro_batch: MicroBatch, entropy: Entropy) -> TokenOutputs:  # noqa: ARG002
        log_probs = self.log_probs[micro_batch.response_index]
        return TokenOutputs(log_probs, torch.zeros_like(log_probs))

    def run_passes(self, batch: Batch, passes: Callable[[list[MicroBatch]], Tensor]) -> Tensor:
        return passes(self.micro_batches(batch))

    def discard_gradient(self) -> None:
        self.log_probs.grad = None

    def optimizer_step(self, allow: Callable[[float], bool]) -> UpdateInfo:
        assert allow(1.0)
        return UpdateInfo(1.0, 1.0)


def trained(policy: Table, prox: Tensor, behave: Tensor, gain: Tensor) -> dict[str, float]:
    """What the recipe's update logs."""
    loaded = load_recipe(RECIPE, ["batch.updates_per_step=1"])
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(1))
    lengths = torch.tensor([after for _, after in LENGTHS])
    columns = {"old_log_probs": prox, "rollout_log_probs": behave, "advantages": gain}
    batch = random_samples(LENGTHS).with_columns(
        reward_valid=torch.ones(len(LENGTHS), dtype=torch.bool),
        policy_versions=Jagged(torch.tensor([3, 3, 2, 2, 2, 3, 3, 3, 2, 2, 2, 2]), lengths, "response_tokens"),
        **{name: Jagged(values, lengths, "response_tokens") for name, values in columns.items()},
    )
    context = StageContext(
        recipe=loaded.recipe,
        node=plan["policy"],
        step=2,
        process_group=GROUP,
        metrics=Metrics(),
        run_directory=cast("RunDirectory", None),
        tokenizer=cast("Tokenizer", None),
        model=ModelRole(cast("TrainEngine", policy), None),
        grade=cast("Grader", None),
    )
    update(batch, context)
    return context.metrics.reduce(GROUP)


def objective(new: float, prox: float, behave: float, gain: float) -> tuple[float, float]:
    """A token's term, to be maximized, and its derivative: (prox / behave) min(u A, clip(u) A) with u = new / prox.

    Tokens whose behavior weight is above the cap are left out, as in the published code.
    """
    weight, u = math.exp(prox - behave), math.exp(new - prox)
    clipped = min(max(u, 1 - CLIP), 1 + CLIP)
    if weight > HIGHEST:
        return 0.0, 0.0
    return weight * min(u * gain, clipped * gain), weight * u * gain if u * gain <= clipped * gain else 0.0


def test_the_update_of_the_recipe_is_the_objective_of_the_paper() -> None:
    noise = torch.Generator().manual_seed(3)
    total = sum(after for _, after in LENGTHS)
    prox, moved, gain = -torch.rand(total, generator=noise), *torch.randn(2, total, generator=noise)
    new, behave = prox + 0.3 * moved, prox + 0.3 * torch.randn(total, generator=noise)
    behave[2] = prox[2] - 2  # a weight of e^2, above the cap
    terms = [objective(*map(float, token)) for token in zip(new, prox, behave, gain, strict=True)]
    assert any(slope == 0 for i, (_, slope) in enumerate(terms) if i != 2), "some token is clipped"
    policy = Table(new)
    numbers = trained(policy, prox, behave, gain)
    # A mean over all tokens: those that are left out count in it.
    assert numbers["policy/loss"] == pytest.approx(-sum(value for value, _ in terms) / total, rel=1e-5)
    expected = torch.tensor([-slope / total for _, slope in terms])
    assert policy.log_probs.grad is not None
    torch.testing.assert_close(policy.log_probs.grad, expected)
    assert numbers["correction/dropped"] == pytest.approx(1 / total)
    assert numbers["rollout/staleness"] == pytest.approx(7 / 12), "seven of twelve tokens are one update old"
