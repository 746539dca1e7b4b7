"""CPGD: a clipped log-ratio and a penalty for drift."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of, widen, with_gradient_of
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, PolicyLoss


class CpgdLoss(PolicyLoss):
    """A clipped log-ratio, and a penalty for drifting away from the old policy.

    The penalty D has the value of the k3 estimate of KL(old || current), e^x - 1 - x, and the gradient of log p, times
    (e^x - 1) cut at drift_clip.

    Formula: -min(x A, clip(x, log(1 - clip_low), log(1 + clip_high)) A) + drift_coefficient D, with x the log-ratio.

    Source: CPGD, arXiv 2505.12504. The paper has one clip range for both sides; equal ones give it. Only the
    exponential in D is cut at +-20: x itself cannot overflow, and tokens far from the old policy keep their gradient.
    """

    type: Literal["cpgd"] = "cpgd"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the log-ratio is at least log(1 - clip_low)."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: the log-ratio is at most log(1 + clip_high)."""
    drift_coefficient: float = Field(default=0.1, ge=0)
    """Weight of the penalty for policy drift."""
    drift_clip: float = Field(default=1.0, gt=0)
    """Largest factor in the penalty's gradient."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_ratio, advantages = inputs.log_ratio, inputs.advantages
        unclipped = log_ratio * advantages
        clipped = log_ratio.clamp(math.log(1 - self.clip_low), math.log(1 + self.clip_high)) * advantages
        excess = ratio_of(log_ratio).detach() - 1
        slope = excess.clamp(max=self.drift_clip) * widen(inputs.log_probs)
        drift = self.drift_coefficient * with_gradient_of(excess - log_ratio, slope)
        return LossOutput(drift - torch.minimum(unclipped, clipped), unclipped > clipped)
