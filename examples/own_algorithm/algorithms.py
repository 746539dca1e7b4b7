"""A custom advantage and a custom policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput, LossInputs, LossOutput, PolicyLoss


class AgainstTheBest(Advantage):
    """The distance of each response from the best of its group, shifted so that the mean of a group is 0.

    Formula: (r - max)^power, with its sign, minus its mean over the group.

    Source: this example.
    """

    power: float = Field(default=1.0, gt=0)
    """How much worse a large distance is than a small one."""

    compares_siblings: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("truncated",)
    metrics: ClassVar[Mapping[str, str]] = {"best/distance": "mean distance from the best response"}

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute one advantage for each response; failed rewards get 0 afterwards, and cut responses do not lead."""
        distances, advantages = torch.zeros_like(inputs.rewards), torch.zeros_like(inputs.rewards)
        for group in inputs.group_ids.unique():
            members = (inputs.group_ids == group) & inputs.is_valid
            leaders = members & ~inputs.column("truncated")
            if leaders.any():
                distances[members] = (inputs.rewards[leaders].max() - inputs.rewards[members]).clamp(min=0)
                behind = -(distances[members] ** self.power)
                advantages[members] = behind - behind.mean()
        return AdvantageOutput(advantages, metrics={"best/distance": distances})


class SquaredRatioLoss(PolicyLoss):
    """The ratio times the advantage, with a quadratic penalty on the change of the ratio instead of clipping.

    Formula: -ratio A + penalty (ratio - 1)^2.

    Source: this example.
    """

    penalty: float = Field(default=0.5, ge=0)
    """Weight of the penalty."""

    metrics: ClassVar[Mapping[str, str]] = {"change": "mean squared change of the ratio"}

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of each token of a micro-batch; `algorithm.aggregation` determines how they are averaged."""
        ratio = (inputs.log_probs - inputs.old_log_probs).clamp(-20, 20).exp()
        change = (ratio - 1).square()
        return LossOutput.without_clipping(-ratio * inputs.advantages + self.penalty * change, {"change": change})
