"""Whole weights packed into memory that two processes see, and checksums of bytes. Imports torch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

CHECKSUM_WORDS = 1 << 16
"""Most words of eight bytes that a CPU adds up at a time, so that they stay in its cache."""
DEVICE_CHECKSUM_WORDS = 1 << 22
"""The same on other devices, which need time to start each operation; `planner/memory/estimate.py` counts them."""


@dataclass(frozen=True)
class PackedWeight:
    """A whole weight, named as in `transformers`, that begins at some byte of a bucket."""

    name: str
    dtype: str
    shape: Sequence[int]
    offset: int

    def view(self, data: Tensor) -> Tensor:
        """View the weight in the [bytes] uint8 of its bucket."""
        dtype = torch_dtype(self.dtype)
        num_bytes = math.prod(self.shape) * dtype.itemsize
        return data[self.offset : self.offset + num_bytes].view(dtype).view(tuple(self.shape))


def torch_dtype(name: str) -> torch.dtype:
    """Look up a type of torch, such as `float32`."""
    return cast("torch.dtype", getattr(torch, name))


def checksum(data: Tensor) -> int:
    """Compute a checksum of [bytes] uint8, a multiple of eight, on the device that holds them; see `checksums`."""
    return int(checksums(data[None]))


def checksums(rows: Tensor) -> Tensor:
    """Compute a checksum, int64, of each row of [n, bytes] uint8, a multiple of eight, on the device that holds them.

    Words of eight bytes are multiplied by consecutive odd numbers and added up modulo 2^64. A single changed word
    always changes the sum.
    """
    words = rows.view(torch.int64)
    most = CHECKSUM_WORDS if rows.device.type == "cpu" else DEVICE_CHECKSUM_WORDS
    at_once = max(1, min(most // max(1, len(rows)), words.shape[1]))
    total = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    odd = torch.arange(1, 2 * at_once, 2, device=rows.device)
    for first in range(0, words.shape[1], at_once):
        part = words[:, first : first + at_once]
        total += (part * odd[: part.shape[1]]).sum(1)
        if first:
            total += part.sum(1) * (2 * first)
    return total
