"""GSPO: the ratio of whole responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leaderless.algorithms.losses.ppo import clipped_surrogate
from leaderless.algorithms.packed import log_ratio_of, repeat_per_token, segment_mean, with_gradient_of
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, ResponseLoss

if TYPE_CHECKING:
    from torch import Tensor


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
        """Compute the loss of each token of a micro-batch."""
        options = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        return gspo_loss(inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.lengths, **options)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossOutput:
    """The clipped surrogate with the ratio s of whole responses.

    Each token has the value of s and the gradient of its own probability.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    mean = repeat_per_token(segment_mean(log_ratio.detach(), lengths), lengths, len(log_ratio))
    return clipped_surrogate(with_gradient_of(mean, log_ratio), advantages, clip_low=clip_low, clip_high=clip_high)
