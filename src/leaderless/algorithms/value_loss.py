"""The loss of a critic, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen
from leaderless.algorithms.policy_loss import LossOutput

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> LossOutput:
    """Half the squared error of a critic, or of its clipped value where that is larger.

    Formula: max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Source: PPO's published code; written out in "The 37 Implementation Details of PPO", 2022, detail 9.

    The inputs, [total] each, are the values v by the current critic, with gradient, those by the critic before this
    step's updates, and the targets R. `clip` is the largest change c of a value in one step; infinity gives the plain
    squared error.
    """
    values, old_values, returns = widen(values), widen(old_values), widen(returns)
    # Clamp to bounds rather than add a clipped change: within them, the clipped value is exactly the value.
    moved = torch.clamp(values, old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (moved - returns).square()
    return LossOutput(0.5 * torch.maximum(plain, clipped), clipped > plain)
