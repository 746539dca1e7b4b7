"""How much better a response was than could be expected."""

from __future__ import annotations

import torch
from torch import Tensor


def grpo_advantages(
    rewards: Tensor, is_valid: Tensor, group_ids: Tensor, *, normalize_by_std: bool, epsilon: float
) -> Tensor:
    """Group-relative advantages, (r - mean) / (std + epsilon) over the responses to a prompt.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision). The paper does not say which standard
    deviation it means; this is that of a sample (n - 1), as is common. A response whose reward failed leaves the
    group's statistics and has advantage 0. So has every response of a group with fewer than two valid rewards, or with
    equal ones: such a group has no signal.

    Args:
        rewards: [n] float.
        is_valid: [n] bool; where false, the reward failed and its value is not looked at.
        group_ids: [n] int64; whole groups, in any order.
        normalize_by_std: Divide by the standard deviation; else only the mean is subtracted.
        epsilon: Added to the standard deviation, above 0.

    Returns:
        [n] float32.
    """
    _, group = torch.unique(group_ids, return_inverse=True)
    num_groups = int(group.max()) + 1 if len(group) else 0
    values = torch.where(is_valid, rewards.double(), 0.0)
    count = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, is_valid.double())
    mean = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, values) / count.clamp(min=1)
    centered = torch.where(is_valid, values - mean[group], 0.0)
    lowest = torch.full((num_groups,), torch.inf, dtype=torch.float64)
    lowest = lowest.scatter_reduce(0, group, torch.where(is_valid, values, torch.inf), "amin")
    highest = torch.full((num_groups,), -torch.inf, dtype=torch.float64)
    highest = highest.scatter_reduce(0, group, torch.where(is_valid, values, -torch.inf), "amax")
    has_signal = (count >= 2) & (highest > lowest)
    if normalize_by_std:
        variance = torch.zeros(num_groups, dtype=torch.float64).index_add(0, group, centered.square())
        std = (variance / (count - 1).clamp(min=1)).sqrt()
        centered = centered / (std + epsilon)[group]
    return torch.where(has_signal[group], centered, 0.0).float()


def count_groups_without_signal(advantages: Tensor, group_ids: Tensor) -> tuple[int, int]:
    """How many groups teach nothing.

    Args:
        advantages: [n], of whole groups.
        group_ids: [n] int64.

    Returns:
        Groups whose advantages are all 0, and all groups.
    """
    groups, group = torch.unique(group_ids, return_inverse=True)
    size = torch.zeros(len(groups), dtype=torch.float64).index_add(0, group, advantages.double().abs())
    return int((size == 0).sum()), len(groups)
