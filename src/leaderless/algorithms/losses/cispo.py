"""CISPO: a clipped ratio as a weight."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.algorithms.packed import ratio_of, widen
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss


class CispoLoss(PolicyLoss):
    """The policy gradient weighted by a clipped ratio without gradient, so that no token loses its own.

    Formula: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, section 3.1. As in the paper, clip_low = 1 means no lower bound.
    """

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """Lower clip range: the ratio is at least 1 - clip_low; 1 for no bound."""
    clip_high: float = Field(default=4.0, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        ratio, advantages = ratio_of(inputs.log_ratio).detach(), inputs.advantages
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = -weight * advantages * widen(inputs.log_probs)
        return LossOutput(loss, (weight != ratio) & (advantages != 0))
