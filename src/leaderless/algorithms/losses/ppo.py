"""PPO and GRPO: the clipped ratio."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of, widen
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class PpoLoss(PolicyLoss):
    """The clipped ratio objective.

    Formula: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), at most -dual_clip A if A < 0.

    Source: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; clip-higher: DAPO, arXiv 2503.14476,
    equation 10; dual clip: Ye et al., arXiv 1912.09729, equation 5.
    """

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the ratio is at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Largest ratio for tokens with negative advantage; unlimited by default."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        limits = {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip or math.inf}
        return clipped_policy_loss(inputs.log_ratio, inputs.advantages, **limits)


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> LossOutput:
    """The clipped surrogate of PPO and GRPO, with clip-higher and dual clip.

    `dual_clip`, above 1 + clip_high, is the largest ratio for tokens with a negative advantage.
    """
    ratio, advantages = ratio_of(log_ratio), widen(advantages)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain, is_clipped = torch.minimum(unclipped, clipped), unclipped > clipped
    if math.isfinite(dual_clip):
        lowest = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        gain, is_clipped = torch.maximum(gain, lowest), is_clipped | (gain < lowest)
    return LossOutput(-gain, is_clipped)
