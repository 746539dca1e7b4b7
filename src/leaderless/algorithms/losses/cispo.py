"""CISPO: a clipped ratio as a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leaderless.algorithms.packed import log_ratio_of, ratio_of, widen
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


class CispoLoss(PolicyLoss):
    """The policy gradient weighted by a clipped ratio.

    Formula: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, section 3.1. As in the paper, clip_low = 1 means no lower bound.
    """

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Lower clip range: the ratio is at least 1 - clip_low; 1 for no bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Compute the loss of each token of a micro-batch."""
        options = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return cispo_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, **options)


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> LossOutput:
    """The policy gradient, weighted by a clipped ratio without gradient, so that no token loses its gradient."""
    ratio = ratio_of(log_ratio_of(log_probs, old_log_probs)).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return LossOutput(-weight * advantages * widen(log_probs), (weight != ratio) & (advantages != 0))
