"""Decoupled PPO: the update of its recipe compared with the objective of the paper, written token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.tiny import random_samples
from torch import Tensor

from leaderless.data.batch import Jagged
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.scoring import Entropy
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import Grader, ModelRole, StageContext
from leaderless.stages.update import update
from leaderless.training.engine import TrainEngine, UpdateInfo
from leaderless.training.forward_passes import BoundedPasses
from leaderless.training.micro_batches import MicroBatch

RECIPE = Path(__file__).parents[3] / "recipes/quickstart/decoupled_ppo.yaml"
LENGTHS = [(2, 3), (1, 4), (3, 0), (2, 5)]
VERSIONS = [3, 3, 2, 2, 2, 3, 3, 3, 2, 2, 2, 2]
"""Version that sampled each token."""
GROUP = ProcessGroup((0,), 0)
TWO_LOOPS = [
    "workflow=grpo",
    "algorithm.aggregation=token_mean",
    "channels.rollout.capacity=1",
    "layout.rollout.ranks=1",
    "layout.policy.ranks=0",
]
"""Overrides with which samples are an update old."""
CLIP, HIGHEST = 0.2, 5.0
"""Bounds of the recipe."""


class Table(BoundedPasses):
    """A policy that has a log-probability for each token."""

    policy_version = 3

    def __init__(self, log_probs: Tensor) -> None:
        super().__init__(GROUP, torch.device("cpu"), 8)
        self.log_probs = log_probs.clone().requires_grad_()

    def forward(self, micro_batch: MicroBatch, entropy: Entropy) -> TokenOutputs:  # noqa: ARG002
        log_probs = self.log_probs[micro_batch.response_index]
        return TokenOutputs(log_probs, torch.zeros_like(log_probs))

    def discard_gradient(self) -> None:
        self.log_probs.grad = None

    def optimizer_step(self, allow: Callable[[float], bool]) -> UpdateInfo:
        assert allow(1.0)
        return UpdateInfo(1.0, 1.0)


def trained(
    policy: Table, prox: Tensor | None, behave: Tensor, gain: Tensor, overrides: Sequence[str] = ()
) -> dict[str, float]:
    """What the recipe's update logs."""
    loaded = load_recipe(RECIPE, ["batch.updates_per_step=1", *overrides])
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(2 if overrides else 1))
    lengths = torch.tensor([after for _, after in LENGTHS])
    columns = {"rollout_log_probs": behave, "advantages": gain} | ({} if prox is None else {"old_log_probs": prox})
    batch = random_samples(LENGTHS).with_columns(
        reward_valid=torch.ones(len(LENGTHS), dtype=torch.bool),
        policy_versions=Jagged(torch.tensor(VERSIONS), lengths, "response_tokens"),
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


class Ahead(Table):
    """A policy that has been updated once since the step began."""

    _has_begun = False

    @property
    def policy_version(self) -> int:  # type: ignore[override]
        return 4 if self._has_begun else 3

    def forward(self, micro_batch: MicroBatch, entropy: Entropy) -> TokenOutputs:
        self._has_begun = True
        return super().forward(micro_batch, entropy)


def test_interpolated_log_probs_are_those_of_the_paper_with_one_update_in_between() -> None:
    noise = torch.Generator().manual_seed(4)
    total = len(VERSIONS)
    behave, moved, gain = -torch.rand(total, generator=noise), *torch.randn(2, total, generator=noise)
    new = behave + 0.3 * moved
    # Of the way from a token's version to the current one, 1 / d is left, where d is their distance.
    distance = torch.tensor([4 - version for version in VERSIONS])
    prox = behave / distance + new * (1 - 1 / distance)
    terms = [objective(*map(float, token)) for token in zip(new, prox, behave, gain, strict=True)]
    assert any(slope == 0 for _, slope in terms), "some token is clipped"
    policy = Ahead(new)
    numbers = trained(policy, None, behave, gain, ["algorithm.proximal=interpolated", *TWO_LOOPS])
    assert numbers["policy/loss"] == pytest.approx(-sum(value for value, _ in terms) / total, rel=1e-5)
    assert policy.log_probs.grad is not None
    torch.testing.assert_close(policy.log_probs.grad, torch.tensor([-slope / total for _, slope in terms]))


def test_the_ages_of_samples_are_reported_where_they_may_differ() -> None:
    total = len(VERSIONS)
    behave, gain = -torch.ones(total), torch.ones(total)
    prox = behave + torch.tensor([0.1 if version == 2 else 0.0 for version in VERSIONS])
    numbers = trained(Table(behave), prox, behave, gain, TWO_LOOPS)
    # Three samples have tokens, and in each the oldest token is one update old.
    assert (numbers["staleness/oldest"], numbers["staleness/share/0"], numbers["staleness/share/1"]) == (1, 0, 1)
    assert numbers["mismatch/kl_by_age/0"] == pytest.approx(0, abs=1e-7)
    assert numbers["mismatch/kl_by_age/1"] == pytest.approx(-0.1)
    assert "mismatch/kl_by_age/2" not in numbers
    ratios = [math.exp(0.1) if version == 2 else 1.0 for version in VERSIONS]
    expected = sum(ratios) ** 2 / (total * sum(ratio**2 for ratio in ratios))
    assert numbers["mismatch/effective_samples"] == pytest.approx(expected)
