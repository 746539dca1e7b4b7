"""Objectives that judge a response as a whole, by a mean over its tokens.

A micro-batch holds whole samples, so that these losses may be split like any other. Their papers average over
responses; that is the aggregation `sequence_mean_token_mean`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.algorithms.policy_loss import PolicyLoss, clipped_surrogate
from leaderless.algorithms.ratios import log_ratio_of, ratio_of, with_gradient_of
from leaderless.algorithms.segments import repeat_per_token, segment_mean


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped surrogate with the ratio s of whole responses.

    Each token has the value of s and the gradient of its own probability (GSPO-token); where all tokens of a response
    share one advantage, as with group-relative ones, value and gradient are those of GSPO.

    Formula: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean of the response's log-ratios).

    Source: GSPO, arXiv 2507.18071, equations 13 and 14 (GSPO-token); the same as equation 5 if A is per response.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        lengths: [n] int64, response tokens; summing to `total`.
        clip_low: Between 0 and 1.
        clip_high: Above 0.

    Returns:
        The loss of each token.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    mean = repeat_per_token(segment_mean(log_ratio.detach(), lengths), lengths)
    return clipped_surrogate(with_gradient_of(mean, log_ratio), advantages, clip_low=clip_low, clip_high=clip_high)


def gmpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The geometric mean of the tokens' ratios times the advantage, each ratio clipped by itself.

    Formula: -A exp(mean of c), with c the log-ratio, at most clip_high if A > 0 and at least -clip_low if A < 0.

    Source: GMPO, arXiv 2507.20673: the clipped product of its objective. For A < 0 its published code cuts at the other
    bound, which is the same number in all its experiments; this follows the paper. The bounds are those of the log, so
    that the paper's range (e^-0.4, e^0.4) is 0.4 and 0.4.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total], the same for all tokens of a response.
        lengths: [n] int64, response tokens; summing to `total`.
        clip_low: Above 0, a log-ratio.
        clip_high: Above 0, a log-ratio.

    Returns:
        The loss of each token: its response's.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    mean = repeat_per_token(segment_mean(clipped, lengths), lengths)
    return PolicyLoss(-ratio_of(mean) * advantages, (clipped != log_ratio) & (advantages != 0))
