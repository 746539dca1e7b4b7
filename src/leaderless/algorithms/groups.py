"""Statistics of the responses to one prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

from leaderless.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Statistics of groups of samples, in double precision, without failed rewards.

    Attributes:
        index: [n] int64, the group of each sample, from 0.
        values: [n], each sample's reward; 0 where it failed.
        is_valid: [n] bool, false where the reward failed.
        count: [g], number of samples with a reward.
        mean: [g], mean of their rewards.
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
            rewards: [n] float; failed ones may have any value, including NaN.
            is_valid: [n] bool, false where the reward failed.
            group_ids: [n] int64, the prompt of each sample; whole groups, in any order.
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
        """[g] float64: sum of [n] values over the samples of each group that have a reward."""
        counted = torch.where(self.is_valid, values.double(), 0.0)
        return torch.zeros_like(self.mean).index_add(0, self.index, counted)

    def centered(self) -> Tensor:
        """[n] float64: each reward minus its group's mean."""
        return self.values - self.mean[self.index]

    def std(self) -> Tensor:
        """[g] float64: sample standard deviation (n - 1)."""
        return (self.sum(self.centered().square()) / (self.count - 1).clamp(min=1)).sqrt()

    def keep_signal(self, advantages: Tensor) -> Tensor:
        """[n] float32: advantages with 0 for failed rewards and for groups without a signal."""
        return torch.where(self.is_valid & self.has_signal[self.index], advantages, 0.0).float()


def count_groups(rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Tensor:
    """[2] float64: groups with a signal, and all groups; summed over ranks they give the share."""
    has_signal = Groups.of(rewards, is_valid, group_ids).has_signal
    return torch.tensor([int(has_signal.sum()), len(has_signal)], dtype=torch.float64)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate, from n >= k responses, of the chance that at least one of k responses is correct.

    Source: Chen et al., arXiv 2107.03374, equation 1: 1 - C(n - c, k) / C(n, k), with c the number of correct ones.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be between 1 and the {num_samples} responses there are")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], is_correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is correct; of equally frequent answers, the first counts.

    A response without an answer, None, has no vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner, _ = votes.most_common(1)[0]
    return is_correct[answers.index(winner)]
