"""Losses of the policy and of the critic, token by token.

All of them take packed response tokens, those of one sample after those of another, and return the loss of each token:

- `log_probs`: [total] under the current policy, with gradient.
- `old_log_probs`: [total] under the policy before this step's updates. The ratio is the probability under the current
  policy over that under the old one.
- `advantages`: [total].
- `lengths`: [n] int64, response tokens of each sample, summing to `total`.
- `clip_low`, `clip_high`: range of the ratio, from 1 - clip_low, with clip_low between 0 and 1, to 1 + clip_high, with
  clip_high above 0.

Log-ratios are cut at +-20 before they are exponentiated, so that nothing overflows: e^20 is far outside any clipping
range. Half-precision inputs are converted to float32, in which losses are computed and returned. GSPO and GMPO judge a
response as a whole, by a mean over its tokens; a micro-batch holds whole samples, so these losses can be split like the
others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.algorithms.lazy import torch
from leaderless.algorithms.segments import (
    log_ratio_of,
    ratio_of,
    repeat_per_token,
    segment_mean,
    widen,
    with_gradient_of,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token, and which tokens it clips.

    Attributes:
        loss: [total], at least float32.
        is_clipped: [total] bool, tokens whose gradient is removed or cut.
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
    """The clipped surrogate of PPO and GRPO, with clip-higher and dual clip.

    Formula: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), at most -dual_clip A if A < 0.

    Source: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3; clip-higher: DAPO, arXiv 2503.14476,
    equation 10; dual clip: Ye et al., arXiv 1912.09729, equation 5.

    `dual_clip`, above 1 + clip_high, is the largest ratio for tokens with a negative advantage.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    return clipped_surrogate(log_ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = math.inf
) -> PolicyLoss:
    """The clipped surrogate of a given log-ratio; see `clipped_policy_loss`."""
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
    """
    return PolicyLoss(-advantages * widen(log_probs), torch.zeros_like(advantages, dtype=torch.bool))


def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """The policy gradient, weighted by a clipped ratio without gradient, so that no token loses its gradient.

    Formula: -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log p.

    Source: CISPO in MiniMax-M1, arXiv 2506.13585, section 3.1.

    As in the paper, clip_low = 1 means no lower bound.
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
    """A soft gate instead of clipping, with one temperature t > 0 for A > 0 and another for A <= 0.

    At ratio 1 it has the gradient of -ratio A. No token counts as clipped.

    Formula: -(4 / t) sigmoid(t (ratio - 1)) A.

    Source: SAPO, arXiv 2511.20347.
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
    log p, the factor cut at drift_clip > 0. As a logarithm is taken of 1 - clip_low, clip_low is below 1.

    Formula: -min(x A, clip(x, log(1 - clip_low), log(1 + clip_high)) A) + drift_coefficient D, with x the log-ratio.

    Source: CPGD, arXiv 2505.12504. The paper has one clip range for both sides; equal ones give it. Only the
    exponential in D is cut at +-20: x itself cannot overflow, and tokens far from the old policy keep their gradient.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    unclipped = log_ratio * advantages
    clipped = log_ratio.clamp(math.log(1 - clip_low), math.log(1 + clip_high)) * advantages
    excess = ratio_of(log_ratio).detach() - 1
    drift = with_gradient_of(excess - log_ratio, excess.clamp(max=drift_clip) * widen(log_probs))
    return PolicyLoss(drift_coefficient * drift - torch.minimum(unclipped, clipped), unclipped > clipped)


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

    Each token has the value of s and the gradient of its own probability (GSPO-token). If all tokens of a response
    share one advantage, as in group-relative methods, value and gradient are those of GSPO.

    Formula: -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean of the response's log-ratios).

    Source: GSPO, arXiv 2507.18071, equations 13 and 14 (GSPO-token); the same as equation 5 if A is per response.
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
    bound, which has the same value in all its experiments; this follows the paper. The bounds are those of the
    log-ratio: the paper's range (e^-0.4, e^0.4) is 0.4 and 0.4.

    All tokens of a response have the same advantage, and get the same loss.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    mean = repeat_per_token(segment_mean(clipped, lengths), lengths)
    return PolicyLoss(-ratio_of(mean) * advantages, (clipped != log_ratio) & (advantages != 0))


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> PolicyLoss:
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
    return PolicyLoss(0.5 * torch.maximum(plain, clipped), clipped > plain)
