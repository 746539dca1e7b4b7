"""SAPO: a soft gate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss


class SapoLoss(PolicyLoss):
    """A soft gate instead of clipping.

    At ratio 1 it has the gradient of -ratio A. No token counts as clipped.

    Formula: -(4 / t) sigmoid(t (ratio - 1)) A, with one temperature t for A > 0 and another for A <= 0.

    Source: SAPO, arXiv 2511.20347.
    """

    type: Literal["sapo"] = "sapo"
    temperature_positive: float = Field(default=1.0, gt=0)
    """How fast the gate closes for tokens of positive advantage."""
    temperature_negative: float = Field(default=1.05, gt=0)
    """How fast the gate closes for all others."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        ratio, is_positive = ratio_of(inputs.log_ratio), inputs.advantages > 0
        temperature = torch.full_like(ratio, self.temperature_negative)
        temperature = temperature.masked_fill(is_positive, self.temperature_positive)
        gate = (temperature * (ratio - 1)).sigmoid() * 4 / temperature
        return LossOutput.without_clipping(-gate * inputs.advantages)
