"""An advantage, a loss and a reward such as a user would write."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless import RewardInput


def own_advantages(rewards: Tensor, reward_valid: Tensor, response_lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards against one half."""
    return torch.where(reward_valid, rewards - 0.5, 0.0)


def own_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, lengths: Tensor) -> Tensor:
    """The unclipped surrogate."""
    return -(log_probs - old_log_probs).exp() * advantages


def own_reward(inputs: RewardInput) -> float:
    """A number between 0 and 1 that differs from response to response."""
    return sum(map(ord, inputs.response)) % 7 / 6
