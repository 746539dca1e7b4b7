"""An advantage and a loss as a user might write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.config import Recipe, RecipeError
from leaderless.config.algorithm import AlgorithmConfig


class OwnAdvantage(Advantage):
    """Rewards minus a constant, less for long prompts."""

    baseline: float = Field(default=0.5, ge=0)
    """What is subtracted."""

    reads: ClassVar[tuple[str, ...]] = ("prompt_tokens", "rows", "rollout_log_probs", "policy_versions")
    metrics: ClassVar[Mapping[str, str]] = {"own/baseline": "mean of what is subtracted"}

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Refuse Dr. GRPO's mean."""
        if algorithm.aggregation == "sequence_mean_token_sum_norm":
            yield f"algorithm.aggregation={algorithm.aggregation} does not go with {self.type}: use another"

    def check(self, recipe: Recipe) -> None:
        """Refuse another temperature."""
        if recipe.rollout.temperature != 1:
            raise RecipeError.at("rollout.temperature", f"is {recipe.rollout.temperature}: {self.type} needs 1")

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses."""
        prompts, rows = inputs.columns["prompt_tokens"], inputs.columns["rows"]
        assert len(prompts) == len(rows) == len(inputs.rewards) == len(inputs.episode_ids)
        assert len(inputs.column("rollout_log_probs")) == int(inputs.lengths.sum())
        assert not inputs.column("policy_versions").lt(inputs.step - 1).any()
        baseline = inputs.rewards.new_tensor([self.baseline / len(prompt) for prompt in prompts])  # type: ignore[arg-type]
        return AdvantageOutput(inputs.rewards - baseline, metrics={"own/baseline": baseline})


def own_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
    """The unclipped surrogate."""
    return -(log_probs - old_log_probs).exp() * advantages
