"""An advantage and a loss as a user might write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from pydantic import Field

from leaderless import Batch, Jagged, StageContext, Workflow, stage
from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput, LossInputs, LossOutput, ResponseLoss
from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.config import Recipe, RecipeError


class OwnAdvantage(Advantage):
    """Rewards minus a constant, less for long prompts."""

    baseline: float = Field(default=0.5, ge=0)
    """What is subtracted."""

    reads: ClassVar[tuple[str, ...]] = ("prompt_tokens", "rows", "rollout_log_probs", "policy_versions", "worth")
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
        return AdvantageOutput(inputs.column("worth") * inputs.rewards - baseline, metrics={"own/baseline": baseline})


class OwnLoss(ResponseLoss):
    """The unclipped surrogate, stronger for rewarded responses and weaker for tokens in doubt."""

    strength: float = Field(default=1.0, gt=0)
    """Factor of responses with a reward."""

    reads: ClassVar[tuple[str, ...]] = ("rewards", "truncated", "rollout_log_probs", "doubt")
    metrics: ClassVar[Mapping[str, str]] = {"ratio": "mean ratio"}

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of each token of a micro-batch."""
        rewards, is_cut = inputs.columns["rewards"], inputs.columns["truncated"]
        assert rewards.shape == is_cut.shape == inputs.columns["rollout_log_probs"].shape == inputs.log_probs.shape
        assert not is_cut.is_floating_point()
        assert not inputs.columns["rollout_log_probs"][~inputs.is_counted].any()
        gains = inputs.advantages * (1 - inputs.columns["doubt"])
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        loss = -ratio * gains * torch.where(rewards > 0, self.strength, 1.0)
        return LossOutput.without_clipping(loss, {"ratio": ratio.detach()})


@stage(reads=["rollout_log_probs", "response_lengths"], writes=["worth", "doubt"])
def weigh(batch: Batch, context: StageContext) -> Batch:
    """What the advantage and the loss read: one number for each response, and one for each of its tokens."""
    lengths = batch.dense("response_lengths")
    doubt = 1 - batch.jagged("rollout_log_probs").values.exp()
    return batch.with_columns(worth=1 + lengths / 8, doubt=Jagged(doubt, lengths, "response_tokens"))


def own_workflow() -> Workflow:
    """A workflow with a stage that writes columns for the advantage and the loss."""
    own = f"{weigh.__module__}:weigh"
    return (
        Workflow("own")
        .node("rollout", run="rollout", role="policy")
        .node("reward", run="reward", after="rollout")
        .node("weigh", run=own, after="rollout")
        .node("old", run="log_probs", role="policy", after="rollout")
        .node("advantage", run="advantage", after=["reward", "weigh", "old"])
        .node("policy", run="update", role="policy", after="advantage")
    )
