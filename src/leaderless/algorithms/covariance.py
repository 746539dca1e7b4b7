"""Restraint where entropy is lost: at tokens whose probability and advantage rise together.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617.
The covariance of a token is taken with respect to the means over its mini-batch on all ranks, so that it depends on
neither micro-batches nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leaderless.algorithms.policy_loss import PolicyLoss, clipped_policy_loss
from leaderless.algorithms.ratios import log_ratio_of, ratio_of, widen

_THRESHOLDS = 64
_ROUNDS = 8


def covariances(log_probs: Tensor, advantages: Tensor, *, mean_log_prob: float, mean_advantage: float) -> Tensor:
    """How much each token adds to the covariance of log-probability and advantage.

    Formula: (log p - mean log p) (A - mean A).

    Source: arXiv 2505.22617, the definition of token-wise covariance before Clip-Cov.

    Args:
        log_probs: [total] under the current policy.
        advantages: [total].
        mean_log_prob: Over all tokens of the mini-batch, on all ranks.
        mean_advantage: Over the same tokens.

    Returns:
        [total], without gradient.
    """
    return (widen(log_probs.detach()) - mean_log_prob) * (widen(advantages) - mean_advantage)


def choose_for_clip_cov(is_in_range: Tensor, noise: Tensor, *, probability: float) -> Tensor:
    """Tokens that Clip-Cov takes the gradient from: some at random of those with a covariance in its range.

    Formula: is_in_range and noise < probability.

    Source: Clip-Cov, arXiv 2505.22617. The paper draws a fixed number of them; here each is drawn by itself with the
    probability that gives this number on average, so that ranks need not agree on more than a count. The published code
    leaves tokens out of the draw whose ratio is clipped already; here they take part, as the paper says nothing of it,
    so that some of those drawn had no gradient to lose.

    Args:
        is_in_range: [total] bool.
        noise: [total], uniform between 0 and 1, fixed by sample and position.
        probability: The number that is wanted over the number in range, on all ranks.

    Returns:
        [total] bool.
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

    Source: Clip-Cov, arXiv 2505.22617. The paper's formula has the plain surrogate for the other tokens, its code the
    clipped one; this follows the code. Chosen tokens count 0 there; here they keep their value and lose only the
    gradient, so that the loss remains comparable.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        is_chosen: [total] bool; see `choose_for_clip_cov`.
        clip_low: Between 0 and 1.
        clip_high: Above 0.

    Returns:
        The loss of each token.
    """
    plain = clipped_policy_loss(log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high)
    return PolicyLoss(torch.where(is_chosen, plain.loss.detach(), plain.loss), plain.is_clipped | is_chosen)


def kl_cov_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, is_chosen: Tensor, *, coefficient: float
) -> PolicyLoss:
    """The unclipped surrogate, with a penalty at the chosen tokens for leaving the old policy.

    Formula: -ratio A, plus coefficient |log-ratio| at the chosen tokens.

    Source: KL-Cov, arXiv 2505.22617. The paper's formula has the divergence to the old policy, its code the absolute
    log-ratio; this follows the code.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        is_chosen: [total] bool: the tokens of largest covariance; see `threshold_of_top`.
        coefficient: Of the penalty.

    Returns:
        The loss of each token; chosen tokens count as clipped.
    """
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    penalty = coefficient * log_ratio.abs()
    return PolicyLoss(-ratio_of(log_ratio) * advantages + torch.where(is_chosen, penalty, 0.0), is_chosen)


def threshold_of_top(values: Tensor, count: int, reduce_sum: Callable[[Tensor], Tensor], highest: float) -> float:
    """A number that `count` values of all ranks are at least as large as, and never more.

    Values that differ by less than highest / 2^46 count as equal. Of equal values either all or none are above the
    threshold, so that fewer than `count` may be. Found by counting values above 64 thresholds at a time, so that ranks
    exchange counts and no values.

    Args:
        values: [total], finite, at most `highest` in size.
        count: How many are wanted, over all ranks.
        reduce_sum: Sum over ranks; all call it equally often.
        highest: At least the size of every value of every rank.

    Returns:
        The threshold.
    """
    low, high = -highest, highest * (1 + 1e-9) + 1e-30
    for _ in range(_ROUNDS):
        thresholds = torch.linspace(low, high, _THRESHOLDS + 1, dtype=torch.float64, device=values.device)
        above = reduce_sum((values.double()[None, :] >= thresholds[:, None]).sum(dim=1).double())
        first = int((above <= count).double().argmax())
        low, high = float(thresholds[max(0, first - 1)]), float(thresholds[first])
    # Rounded up to a number of the values' own kind, because a comparison rounds it to one.
    rounded = torch.tensor(high, dtype=values.dtype)
    if rounded.double() < high:
        rounded = torch.nextafter(rounded, torch.tensor(torch.inf, dtype=values.dtype))
    return float(rounded)
