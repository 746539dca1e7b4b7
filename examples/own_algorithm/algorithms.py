"""A custom advantage and a custom policy loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput


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


def squared_ratio_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
    """The ratio times the advantage, with a quadratic penalty on the change of the ratio instead of clipping.

    Args:
        log_probs: [total] log-probabilities under the current policy, with gradient.
        old_log_probs: [total] log-probabilities before this step's updates.
        advantages: [total] advantages.
        lengths: [n] int64 response tokens of each sample, whose sum is `total`.

    Returns:
        [total] loss of each token; `algorithm.aggregation` determines how they are averaged.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    return -ratio * advantages + 0.5 * (ratio - 1).square()
