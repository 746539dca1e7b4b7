"""SAPO: a soft gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import log_ratio_of, ratio_of
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss

if TYPE_CHECKING:
    from torch import Tensor


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
        """Compute the loss of each token of a micro-batch."""
        options = self.model_dump(exclude={"type"})
        return sapo_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, **options)


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> LossOutput:
    """The surrogate through a soft gate; at ratio 1 it has the gradient of -ratio A, and no token counts as clipped."""
    ratio = ratio_of(log_ratio_of(log_probs, old_log_probs))
    temperature = torch.full_like(ratio, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    gate = (temperature * (ratio - 1)).sigmoid() * 4 / temperature
    return LossOutput.without_clipping(-gate * advantages)
