"""The objective whose gradient makes good tokens likelier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios beyond it are cut, so that no ratio overflows; e^20 is far outside any clipping range."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token, and what is worth watching.

    Attributes:
        loss: [total].
        is_clipped: [total] bool, tokens whose gradient the clipping has removed.
    """

    loss: Tensor
    is_clipped: Tensor


def clipped_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The clipped surrogate, -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    Source: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3, uses the same. One deviation: the
    log-ratio is cut at +-20 before it is exponentiated.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        clip_low: Between 0 and 1.
        clip_high: Above 0.

    Returns:
        The loss of each token.
    """
    ratio = _ratio(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = (ratio * advantages > clipped * advantages) & (advantages != 0)
    return PolicyLoss(loss, is_clipped)


def k3_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The KL divergence to the reference, estimated at each sampled token: r - log r - 1 with r = p_ref / p.

    Source: GRPO, arXiv 2402.03300, equation 4; known as the k3 estimator. Never negative. One deviation: the log-ratio
    is cut at +-20 before it is exponentiated.

    Args:
        log_probs: [total] under the current policy, with gradient.
        ref_log_probs: [total] under the reference.

    Returns:
        [total].
    """
    log_ratio = ref_log_probs - log_probs
    return _ratio(log_ratio) - log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) - 1


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
