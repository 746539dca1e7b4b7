"""Objectives whose gradient makes good tokens likelier: those that judge each token by itself.

Log-ratios are cut at +-20 before they are exponentiated, here and in the other losses, so that nothing overflows:
e^20 is far outside any clipping range. Half-precision inputs are computed with, and the loss returned, in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms.ratios import log_ratio_of, ratio_of, widen, with_gradient_of


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token, and what is worth watching.

    Attributes:
        loss: [total], at least float32.
        is_clipped: [total] bool, tokens whose gradient has been removed or cut.
    """

    loss: Tensor
    is_clipped: Tensor


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> PolicyLoss:
    """The clipped surrogate of PPO and GRPO; with clip-higher and dual clip.

    Formula: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), at most -dual_clip A if A < 0.

    Source: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; clip-higher: DAPO, arXiv 2503.14476,
    equation 10; dual clip: Ye et al., arXiv 1912.09729, equation 5.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        clip_low: Between 0 and 1.
        clip_high: Above 0.
        dual_clip: Above 1 + clip_high; the largest ratio that a token with negative advantage is pushed down by.

    Returns:
        The loss of each token.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    return clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> PolicyLoss:
    """The clipped surrogate of a given log-ratio; see `clipped_policy_loss`.

    Args:
        log_ratio: [total], with gradient.
        advantages: [total].
        clip_low: Between 0 and 1.
        clip_high: Above 0.
        dual_clip: Above 1 + clip_high.

    Returns:
        The loss of each token.
    """
    ratio, advantages = ratio_of(log_ratio), widen(advantages)
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain, is_clipped = torch.minimum(unclipped, clipped), unclipped > clipped
    if math.isfinite(dual_clip):
        lowest = torch.where(advantages < 0, dual_clip * advantages, -torch.inf)
        gain, is_clipped = torch.maximum(gain, lowest), is_clipped | (gain < lowest)
    return PolicyLoss(-gain, is_clipped)


def reinforce_loss(log_probs: Tensor, advantages: Tensor) -> PolicyLoss:
    """The plain policy gradient.

    Formula: -A log p.

    Source: Williams, "Simple statistical gradient-following algorithms", 1992; GPG, arXiv 2504.02546, uses it without
    clipping or ratio.

    Args:
        log_probs: [total] under the current policy, with gradient.
        advantages: [total].

    Returns:
        The loss of each token.
    """
    return PolicyLoss(-advantages * widen(log_probs), torch.zeros_like(advantages, dtype=torch.bool))


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The policy gradient, weighted with a clipped ratio that has no gradient. No token loses its own.

    Formula: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, section 3.1.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        clip_low: The ratio is clipped from below at 1 - clip_low; 1 leaves it open, as the paper does.
        clip_high: The ratio is clipped from above at 1 + clip_high.

    Returns:
        The loss of each token.
    """
    ratio = ratio_of(log_ratio_of(log_probs, old_log_probs)).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return PolicyLoss(-weight * advantages * widen(log_probs), (weight != ratio) & (advantages != 0))


def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> PolicyLoss:
    """A soft gate instead of clipping, with a temperature t for each sign of A.

    At ratio 1 its gradient is that of -ratio A.

    Formula: -(4 / t) sigmoid(t (ratio - 1)) A.

    Source: SAPO, arXiv 2511.20347.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        temperature_positive: For A > 0, above 0.
        temperature_negative: For A <= 0, above 0.

    Returns:
        The loss of each token; none counts as clipped.
    """
    ratio = ratio_of(log_ratio_of(log_probs, old_log_probs))
    temperature = torch.full_like(ratio, temperature_negative).masked_fill(advantages > 0, temperature_positive)
    gate = (temperature * (ratio - 1)).sigmoid() * 4 / temperature
    return PolicyLoss(-gate * advantages, torch.zeros_like(advantages, dtype=torch.bool))


def cpgd_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    drift_coefficient: float,
    drift_clip: float,
) -> PolicyLoss:
    """A clipped log-ratio in place of the ratio, and a penalty D for drifting away from the old policy.

    D has the value of the k3 estimate of KL(old || current), e^x - 1 - x, and its gradient (e^x - 1) times that of
    log p, the factor cut at drift_clip.

    Formula: -min(x A, clip(x, log(1 - clip_low), log(1 + clip_high)) A) + drift_coefficient D, with x the log-ratio.

    Source: CPGD, arXiv 2505.12504. The paper has one clip range for both sides; equal ones give it. Only the
    exponential in D is cut at +-20: x itself cannot overflow, and tokens far from the old policy keep their gradient.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        clip_low: Between 0 and 1, both excluded.
        clip_high: Above 0.
        drift_coefficient: At least 0.
        drift_clip: Largest factor of the drift's gradient, above 0.

    Returns:
        The loss of each token.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    unclipped = log_ratio * advantages
    clipped = log_ratio.clamp(math.log(1 - clip_low), math.log(1 + clip_high)) * advantages
    excess = ratio_of(log_ratio).detach() - 1
    drift = with_gradient_of(excess - log_ratio, excess.clamp(max=drift_clip) * widen(log_probs))
    return PolicyLoss(drift_coefficient * drift - torch.minimum(unclipped, clipped), unclipped > clipped)
