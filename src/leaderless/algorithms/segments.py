"""Sums over the tokens of each sample, in packed form: values one behind the other, and lengths."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sample's tokens.

    Args:
        values: [total].
        lengths: [n] int64, summing to `total`.

    Returns:
        [n]; 0 for a sample without tokens.
    """
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    return values.new_zeros(len(lengths)).index_add(0, sample, values)


def repeat_per_token(values: Tensor, lengths: Tensor) -> Tensor:
    """Each sample's value, once for each of its tokens.

    Args:
        values: [n].
        lengths: [n] int64.

    Returns:
        [sum(lengths)].
    """
    return torch.repeat_interleave(values, lengths)
