"""What the rewards of the responses to one prompt have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Statistics of groups of samples, in double precision; failed rewards are in none of them.

    Attributes:
        index: [n] int64, the group of each sample, from 0.
        values: [n], each sample's reward; 0 where it failed.
        is_valid: [n] bool.
        count: [g], samples with a reward.
        mean: [g], of their rewards.
        has_signal: [g] bool: at least two rewards, and not all the same.
    """

    index: Tensor
    values: Tensor
    is_valid: Tensor
    count: Tensor
    mean: Tensor
    has_signal: Tensor

    @classmethod
    def of(cls, rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Groups:
        """Sort samples into groups.

        Args:
            rewards: [n] float; what failed may be anything, NaN included.
            is_valid: [n] bool; false where the reward failed.
            group_ids: [n] int64; whole groups, in any order.
        """
        names, index = torch.unique(group_ids, return_inverse=True)
        values = torch.where(is_valid, rewards.double(), 0.0)
        zeros = torch.zeros(len(names), dtype=torch.float64, device=rewards.device)
        count = zeros.index_add(0, index, is_valid.double())
        mean = zeros.index_add(0, index, values) / count.clamp(min=1)
        lowest = (zeros + torch.inf).scatter_reduce(0, index, torch.where(is_valid, values, torch.inf), "amin")
        highest = (zeros - torch.inf).scatter_reduce(0, index, torch.where(is_valid, values, -torch.inf), "amax")
        return cls(index, values, is_valid, count, mean, (count >= 2) & (highest > lowest))

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the samples of each group that have a reward.

        Args:
            values: [n].

        Returns:
            [g] float64.
        """
        counted = torch.where(self.is_valid, values.double(), 0.0)
        return torch.zeros_like(self.mean).index_add(0, self.index, counted)

    def centered(self) -> Tensor:
        """[n] float64: each reward less its group's mean."""
        return self.values - self.mean[self.index]

    def std(self) -> Tensor:
        """[g] float64: standard deviation of a sample (n - 1)."""
        return (self.sum(self.centered().square()) / (self.count - 1).clamp(min=1)).sqrt()

    def keep_signal(self, advantages: Tensor) -> Tensor:
        """Advantages with 0 for failed rewards and for groups without signal.

        Args:
            advantages: [n].

        Returns:
            [n] float32.
        """
        return torch.where(self.is_valid & self.has_signal[self.index], advantages, 0.0).float()


def count_groups(rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Tensor:
    """How many groups have a signal; summed over ranks, for what scales by their share.

    Args:
        rewards: [n] float.
        is_valid: [n] bool; false where the reward failed.
        group_ids: [n] int64; whole groups.

    Returns:
        [2] float64: groups with a signal, and all groups.
    """
    has_signal = Groups.of(rewards, is_valid, group_ids).has_signal
    return torch.tensor([int(has_signal.sum()), len(has_signal)], dtype=torch.float64)
