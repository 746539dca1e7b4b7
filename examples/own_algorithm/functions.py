"""A custom advantage and a custom policy loss."""

from __future__ import annotations

import torch
from torch import Tensor


def against_the_best(rewards: Tensor, reward_valid: Tensor, response_lengths: Tensor, group_ids: Tensor) -> Tensor:
    """The distance of each response from the best of its group, shifted so that the mean of a group is 0.

    Args:
        rewards: [n] float rewards; 0 where the reward failed.
        reward_valid: [n] bool, false where the reward failed; the advantage is set to 0 there.
        response_lengths: [n] int64 numbers of sampled tokens.
        group_ids: [n] int64 ids of groups, which are whole and in any order.

    Returns:
        [n] advantages, the same for all tokens of a response.
    """
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = (group_ids == group) & reward_valid
        if members.any():
            behind = rewards[members] - rewards[members].max()
            advantages[members] = behind - behind.mean()
    return advantages


def squared_ratio_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
    """The ratio times the advantage, with a quadratic penalty on the change of the ratio instead of clipping.

    Args:
        log_probs: [total] log-probabilities under the current policy, with gradient.
        old_log_probs: [total] log-probabilities before this step's updates.
        advantages: [total] advantages.
        lengths: [n] int64 response tokens of each sample, whose sum is `total`.

    Returns:
        [total] loss of each token; `algorithm.aggregation` determines how they are averaged.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    return -ratio * advantages + 0.5 * (ratio - 1).square()
