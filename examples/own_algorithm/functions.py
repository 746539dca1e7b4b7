"""An advantage and a policy loss of one's own."""

from __future__ import annotations

import torch
from torch import Tensor


def against_the_best(rewards: Tensor, reward_valid: Tensor, response_lengths: Tensor, group_ids: Tensor) -> Tensor:
    """How far each response falls behind the best of its group; the best ones share what the others lose.

    Args:
        rewards: [n] float; 0 where the reward failed.
        reward_valid: [n] bool; where false, the reward failed and the advantage is set to 0.
        response_lengths: [n] int64, sampled tokens.
        group_ids: [n] int64; whole groups, in any order.

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
    """The ratio times the advantage, with a quadratic penalty for leaving the old policy in place of clipping.

    Args:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        lengths: [n] int64, response tokens of each sample; summing to `total`.

    Returns:
        [total], the loss of each token; what they are averaged over is `algorithm.aggregation`.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    return -ratio * advantages + 0.5 * (ratio - 1).square()
