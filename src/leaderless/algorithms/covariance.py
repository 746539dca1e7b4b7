"""Losses that slow the loss of entropy, at tokens whose probability and advantage are high together.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.
Covariances are taken with respect to the means over the mini-batch on all ranks, so that they depend on neither
micro-batches nor ranks. Arguments are those of the losses in `policy_loss.py`; `is_chosen` and `is_in_range` are
[total] bool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from leaderless.algorithms.lazy import torch
from leaderless.algorithms.policy_loss import PolicyLoss, clipped_policy_loss
from leaderless.algorithms.segments import log_ratio_of, ratio_of, widen

if TYPE_CHECKING:
    from torch import Tensor

_THRESHOLDS = 64
_ROUNDS = 8


def covariances(log_probs: Tensor, advantages: Tensor, *, mean_log_prob: float, mean_advantage: float) -> Tensor:
    """The contribution, without gradient, of each token to the covariance of log-probability and advantage.

    Formula: (log p - mean log p) (A - mean A).

    Source: arXiv 2505.22617, the definition of token-wise covariance before Clip-Cov.
    """
    return (widen(log_probs.detach()) - mean_log_prob) * (widen(advantages) - mean_advantage)


def choose_for_clip_cov(is_in_range: Tensor, noise: Tensor, *, probability: float) -> Tensor:
    """Tokens whose gradient Clip-Cov removes: a random part of those with a covariance in its range.

    Formula: is_in_range and noise < probability.

    Source: Clip-Cov, arXiv 2505.22617. The paper draws a fixed number of tokens; here each is drawn independently, with
    the probability that gives this number on average, so that ranks only have to agree on a count. The published code
    leaves out tokens whose ratio is already clipped; here they take part, as in the paper, so that some of the drawn
    tokens had no gradient to lose.

    `noise`, [total], is uniform between 0 and 1 and determined by sample and position. `probability` is the intended
    number of tokens over the number in range, on all ranks.
    """
    return is_in_range & (noise < probability)


def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    is_chosen: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """The clipped surrogate, without gradient at the chosen tokens.

    Formula: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), of which sg[...] at the chosen tokens.

    Source: Clip-Cov, arXiv 2505.22617. For the other tokens, the paper's formula has the plain surrogate and its code
    the clipped one; this follows the code. There, chosen tokens have loss 0; here they keep their value and lose only
    the gradient, so that losses remain comparable.
    """
    plain = clipped_policy_loss(log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high)
    return PolicyLoss(torch.where(is_chosen, plain.loss.detach(), plain.loss), plain.is_clipped | is_chosen)


def kl_cov_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, is_chosen: Tensor, *, coefficient: float
) -> PolicyLoss:
    """The unclipped surrogate, with a penalty at the chosen tokens for moving away from the old policy.

    The tokens of largest covariance are chosen, by `threshold_of_top`, and count as clipped.

    Formula: -ratio A, plus coefficient |log-ratio| at the chosen tokens.

    Source: KL-Cov, arXiv 2505.22617. The paper's formula has the divergence to the old policy, its code the absolute
    log-ratio; this follows the code.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    penalty = coefficient * log_ratio.abs()
    return PolicyLoss(-ratio_of(log_ratio) * advantages + torch.where(is_chosen, penalty, 0.0), is_chosen)


def threshold_of_top(values: Tensor, count: int, reduce_sum: Callable[[Tensor], Tensor], highest: float) -> float:
    """A threshold that `count` values of all ranks reach, or fewer if values are equal, but never more.

    Values that differ by less than highest / 2^46 count as equal, and equal values either all reach the threshold or
    none does. It is found by counting values above 64 thresholds at a time: ranks exchange counts, not values.
    Values are [total] and finite, and `highest` bounds their magnitude on every rank; all ranks call `reduce_sum`
    equally often.
    """
    low, high = -highest, highest * (1 + 1e-9) + 1e-30
    for _ in range(_ROUNDS):
        thresholds = torch.linspace(low, high, _THRESHOLDS + 1, dtype=torch.float64, device=values.device)
        above = reduce_sum((values.double()[None, :] >= thresholds[:, None]).sum(dim=1).double())
        first = int((above <= count).double().argmax())
        low, high = float(thresholds[max(0, first - 1)]), float(thresholds[first])
    # Rounded up to the type of the values, because a comparison converts it to that type.
    rounded = torch.tensor(high, dtype=values.dtype)
    if rounded.double() < high:
        rounded = torch.nextafter(rounded, torch.tensor(torch.inf, dtype=values.dtype))
    return float(rounded)
