"""Ratios of two policies' probabilities, without overflow and in enough precision."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut at plus and minus this before they are exponentiated: far outside any clipping range."""


def widen(values: Tensor) -> Tensor:
    """Half-precision numbers as float32, all others as they are.

    Sums over a response, and ratios within 1e-4 of 1, do not exist in bfloat16, which has three digits.

    Args:
        values: Any shape.

    Returns:
        The same shape.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio_of(log_probs: Tensor, others: Tensor) -> Tensor:
    """The logarithm of the ratio of two probabilities, at least in float32.

    Args:
        log_probs: Any shape.
        others: The same shape.

    Returns:
        The same shape.
    """
    return widen(log_probs) - widen(others)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The ratio of two probabilities. Beyond the cut it is constant, and has no gradient.

    Args:
        log_ratio: Any shape.

    Returns:
        The same shape.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def with_gradient_of(value: Tensor, source: Tensor) -> Tensor:
    """A tensor with one's value and another's gradient.

    Args:
        value: Any shape.
        source: The same shape, finite.

    Returns:
        The same shape.
    """
    return value.detach() + (source - source.detach())
