"""GSPO: the ratio of whole responses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.algorithms.losses.ppo import clipped_policy_loss
from leaderless.algorithms.packed import repeat_per_token, segment_mean, with_gradient_of
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, ResponseLoss


class GspoLoss(ResponseLoss):
    """The clipped objective with the ratio of whole responses.

    Each token has the value of s and the gradient of its own probability (GSPO-token). If all tokens of a response
    share one advantage, as in group-relative methods, value and gradient are the same as in GSPO.

    Formula: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean of the response's log-ratios).

    Source: GSPO, arXiv 2507.18071, equations 13 and 14 (GSPO-token); the same as equation 5 if A is per response.
    """

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """Lower clip range: the ratio is at least 1 - clip_low."""
    clip_high: float = Field(default=4e-4, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_ratio, lengths = inputs.log_ratio, inputs.lengths
        mean = repeat_per_token(segment_mean(log_ratio.detach(), lengths), lengths, len(log_ratio))
        log_s = with_gradient_of(mean, log_ratio)
        return clipped_policy_loss(log_s, inputs.advantages, clip_low=self.clip_low, clip_high=self.clip_high)
