"""What trains a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.algorithms.policy_loss import PolicyLoss
from leaderless.algorithms.ratios import widen


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> PolicyLoss:
    """Half the squared error, or that of the clipped value where it is larger.

    Formula: max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Source: PPO's published code; written out in "The 37 Implementation Details of PPO", 2022, detail 9.

    Args:
        values: [total] of the current critic, with gradient.
        old_values: [total] of the critic before this step's updates.
        returns: [total], the targets.
        clip: Furthest that a value is moved in one step; infinity for the plain squared error.

    Returns:
        The loss of each token.
    """
    values, old_values, returns = widen(values), widen(old_values), widen(returns)
    # Bounds, not old values plus a cut change: inside of them the clipped value is the value, to the last bit.
    moved = torch.clamp(values, old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (moved - returns).square()
    return PolicyLoss(0.5 * torch.maximum(plain, clipped), clipped > plain)
