"""Advantages of single tokens, from rewards along the response.

Tensors hold the tokens that the policy sampled and no others: what tools or an environment wrote between two turns is
not there, so that each token is followed by the next one that the policy chose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.algorithms.ratios import widen
from leaderless.algorithms.segments import add_to_last, decayed_sum, repeat_per_token


def token_level_rewards(rewards: Tensor, is_valid: Tensor, penalties: Tensor, lengths: Tensor) -> Tensor:
    """The reward at the last token, less a penalty at each.

    Formula: r_t = (reward if t is the last token) - penalty_t; 0 at all tokens of a sample whose reward failed.

    Source: InstructGPT, arXiv 2203.02155, with the penalty spread over tokens as is common.

    Args:
        rewards: [n] float.
        is_valid: [n] bool; where false, the reward failed and its value is not looked at.
        penalties: [total], as a coefficient times the KL divergence to the reference.
        lengths: [n] int64, response tokens; summing to `total`.

    Returns:
        [total], at least float32.
    """
    token_rewards = add_to_last(-penalties, rewards, lengths)
    return torch.where(repeat_per_token(is_valid, lengths), token_rewards, 0.0)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation.

    Formula: A_t = d_t + discount decay A_{t+1}, with d_t = r_t + discount V_{t+1} - V_t.

    Source: Schulman et al., arXiv 1506.02438, equations 11 and 16. The state behind the last token is worth 0.

    Args:
        token_rewards: [total].
        values: [total], V_t: what the critic expected before each token.
        lengths: [n] int64, response tokens; summing to `total`.
        discount: Gamma, between 0 and 1.
        decay: Lambda, between 0 and 1.

    Returns:
        [total] advantages, and [total] returns A_t + V_t, the critic's targets; both at least float32.
    """
    token_rewards, values = widen(token_rewards), widen(values)
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    has_tokens = lengths > 0
    following[lengths.cumsum(0)[has_tokens] - 1] = 0.0
    surprises = token_rewards + discount * following - values
    advantages = decayed_sum(surprises, lengths, discount * decay)
    return advantages, advantages + values


def reinforce_advantages(token_rewards: Tensor, lengths: Tensor, *, discount: float) -> Tensor:
    """Returns to go; REINFORCE++ whitens them over all tokens of all ranks.

    Formula: A_t = r_t + discount A_{t+1}.

    Source: REINFORCE++, arXiv 2501.03262, whose discount is 1; see `whiten`.

    Args:
        token_rewards: [total].
        lengths: [n] int64, response tokens; summing to `total`.
        discount: Gamma, between 0 and 1.

    Returns:
        [total].
    """
    return decayed_sum(token_rewards, lengths, discount)
