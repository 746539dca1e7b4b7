"""Losses besides the policy's: the KL penalty and the control of its weight, and those of critics and reward models."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import MAX_LOG_RATIO, log_ratio_of, widen, with_gradient_of
from leaderless.algorithms.policy_loss import LossOutput

if TYPE_CHECKING:
    from torch import Tensor


KlEstimator = Literal["k1", "k2", "k3", "absolute"]


def kl_penalty(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: KlEstimator, *, unbiased_gradient: bool = False
) -> Tensor:
    """The KL divergence of the current policy from the reference, estimated at each sampled token.

    With x = log p - log p_ref, for tokens sampled from p:

    - `k1`: x, unbiased in value, of either sign; Schulman, "Approximating KL divergence", 2020. Its gradient in the
      reward is that of the divergence, and in the loss 0 on average: Liu et al., arXiv 2510.01555.
    - `k2`: x^2 / 2, biased in value; Schulman, 2020. Its gradient in the loss is that of the divergence: Liu et al.,
      2025; Tang and Munos, arXiv 2506.09477.
    - `k3`: e^-x - 1 + x, unbiased in value, never negative; Schulman, 2020; GRPO, arXiv 2402.03300, equation 4. Its
      gradient in the loss is that of the reverse divergence, the same to first order near the reference.
    - `absolute`: |x|, a distance rather than an estimate of the divergence; as offered by verl. Its gradient in the
      loss is that of the sum of |p - p_ref|.

    In the reward, where the estimate is a number without gradient, k2, k3 and the absolute value do not point to the
    reference: the gradient of k3 is that of the divergence minus that of the reverse one, which cancel near it. In the
    loss `unbiased_gradient` gives each estimate the gradient of k2.

    Source: Schulman, "Approximating KL divergence", 2020; gradients: Tang and Munos, 2506.09477, and Liu et al.,
    2510.01555. One deviation: for k3, x is at least -20, without gradient below, so that nothing overflows.

    Log-probabilities are [total]; so is the result, at least float32.
    """
    difference = log_ratio_of(log_probs, ref_log_probs)
    match estimator:
        case "k1":
            value = difference
        case "k2":
            value = 0.5 * difference.square()
        case "k3":
            bounded = difference.clamp(min=-MAX_LOG_RATIO)
            # expm1, because near 0 the three terms cancel to less than the rounding of the first.
            value = (-bounded).expm1() + bounded
        case "absolute":
            value = difference.abs()
    if not unbiased_gradient:
        return value
    return with_gradient_of(value, difference.detach() * widen(log_probs))


def adapted_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, num_episodes: int) -> float:
    """The weight of the KL penalty for the next step, moved such that the divergence approaches its target.

    Formula: b (1 + clip(kl / target - 1, -0.2, 0.2) min(1, n / horizon)).

    Source: Ziegler et al., arXiv 1909.08593, section 2.2, with the gain n / horizon of its published code. One
    deviation: the gain is at most 1, without which a short horizon would make the weight negative.

    Args:
        coefficient: Weight so far, above 0.
        kl: Measured mean divergence of the step's episodes.
        target: Intended divergence, above 0.
        horizon: Number of episodes over which the weight can change by about a fifth, above 0.
        num_episodes: Number of the step's episodes.

    Returns:
        The new weight, above 0.

    Raises:
        ValueError: The divergence is not a number.
    """
    if math.isnan(kl):
        raise ValueError("kl=nan: cannot adapt the weight of the KL penalty; the log-probs of the step are broken")
    error = min(0.2, max(-0.2, kl / target - 1))
    return coefficient * (1 + error * min(1.0, num_episodes / horizon))


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> LossOutput:
    """Half the squared error of a critic, or of its clipped value where that is larger.

    Formula: max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Source: PPO's published code; written out in "The 37 Implementation Details of PPO", 2022, detail 9.

    The inputs, [total] each, are the values v by the current critic, with gradient, those by the critic before this
    step's updates, and the targets R. `clip` is the largest change c of a value in one step; infinity gives the plain
    squared error.
    """
    values, old_values, returns = widen(values), widen(old_values), widen(returns)
    # Clamp to bounds rather than add a clipped change: within them, the clipped value is exactly the value.
    moved = torch.clamp(values, old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (moved - returns).square()
    return LossOutput(0.5 * torch.maximum(plain, clipped), clipped > plain)


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor, *, centering: float) -> Tensor:
    """[n] negative log-likelihood that the chosen of two responses is preferred, given the scores [n] of both.

    A chosen response is to be better by a margin, [n], at least. Only differences of scores matter; centering pulls the
    mean of both to 0.

    Formula: -log sigmoid(s_chosen - s_rejected - margin) + centering (s_chosen + s_rejected)^2.

    Source: InstructGPT, arXiv 2203.02155, equation 1, for single pairs; the margin as in Llama 2, arXiv 2307.09288,
    equation 2; centering as in Helping or Herding, arXiv 2312.09244, section 2.
    """
    chosen, rejected = widen(chosen), widen(rejected)
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - margins.to(chosen))
    return loss + centering * (chosen + rejected).square() if centering else loss
