"""Between padded `[B, T]` tensors with a mask, as other frameworks use them, and the packed form of this package."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The masked values of each row, one row behind the other.

    Args:
        values: [B, T]; what the mask leaves out may be anything.
        mask: [B, T] bool, or numbers that are 0 where nothing counts.

    Returns:
        [total] values, and [B] int64 lengths.
    """
    is_counted = mask.bool()
    return values[is_counted], is_counted.sum(dim=1)


def unpack(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Packed values in their padded places.

    Args:
        values: [total], as `pack` gives them.
        mask: [B, T] bool, or numbers that are 0 where nothing counts.
        fill: What stands elsewhere.

    Returns:
        [B, T].

    Raises:
        ValueError: There are not as many values as places.
    """
    places = int(mask.bool().sum())
    if places != len(values):
        raise ValueError(f"values: {len(values)} of them for the {places} places of the mask; pack with the same mask")
    return torch.full(mask.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(mask.bool(), values)
