"""Whole weights packed into buckets, in memory that a trainer and an engine see, and checksums of bytes.

Imports torch and nothing heavier, as it also runs in the interpreter of an engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import cast

import torch
from torch import Tensor

from leaderless.base.values import Json

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


BUCKET_BYTES = 1 << 28
"""Most bytes of a bucket; a larger weight has a bucket to itself."""
ALIGNMENT = 16
"""Divisor of the offset at which each weight begins, in bytes."""


@dataclass(frozen=True)
class WeightBucket:
    """Weights that are sent together, one after the other, in [bytes] uint8 that a later bucket overwrites."""

    weights: tuple[PackedWeight, ...]
    data: Tensor


class LocalStaging:
    """Memory of this process, on any device, in which buckets are packed and from which the engine reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._data = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """Return [bytes] uint8, at least as many as asked for; the same memory as before if it is large enough."""
        if len(self._data) < num_bytes:
            self.close()
            self._data = self._allocate(num_bytes)
        return self._data

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """Release the memory."""
        self._data = torch.empty(0, dtype=torch.uint8)


class CudaStaging(LocalStaging):
    """Memory of a CUDA device that other processes map by its IPC handle."""

    def _allocate(self, num_bytes: int) -> Tensor:
        data = super()._allocate(num_bytes)
        # Each handle counts as a use until it is opened, so all buckets share one.
        _, *handle = data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        self._handle: Json = [part.hex() if isinstance(part, bytes) else part for part in handle]
        return data

    def place(self) -> Json:
        """Return what the engine needs to find the memory."""
        return {"handle": self._handle}


class HostStaging(LocalStaging):
    """Host memory that other processes of the same user can map.

    It has no name in any folder: no mount limits its size, and it is released even if this process is killed.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._file: int | None = None

    def _allocate(self, num_bytes: int) -> Tensor:
        self._file = os.memfd_create("leaderless-weights")
        os.posix_fallocate(self._file, 0, num_bytes)  # lack of memory is an error here, not a signal later
        return torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Release the memory."""
        super().close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def place(self) -> Json:
        """Return what the engine needs to find the memory; the inode tells it from earlier memory under this path."""
        assert self._file is not None
        return {"file": self._path, "number": os.fstat(self._file).st_ino, "bytes": len(self._data)}


def make_buckets(
    named: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *stagings: LocalStaging,
    max_bytes: int = BUCKET_BYTES,
    exact: Collection[str] = (),
) -> Iterator[WeightBucket]:
    """Pack whole weights in the type in which the engine computes; those with `exact` names are packed as they are.

    The stagings take turns, so a caller with one has to use each bucket before it asks for the next, and a caller with
    two the one before. A weight larger than `max_bytes` has a bucket to itself. An accelerator may still be copying:
    before another process reads a bucket, the caller waits for the device.
    """
    weights: list[PackedWeight] = []
    end, turns = 0, cycle(stagings)
    staging = next(turns)
    for name, tensor in named:
        own_dtype = tensor.dtype if name in exact else dtype
        num_bytes = tensor.numel() * own_dtype.itemsize
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if weights and end + size > max_bytes:
            yield WeightBucket(tuple(weights), staging.room(max_bytes)[:end])
            weights, end, staging = [], 0, next(turns)
        weight = PackedWeight(name, str(own_dtype).removeprefix("torch."), tuple(tensor.shape), end)
        data = staging.room(max(max_bytes, size))
        weight.view(data).copy_(tensor)
        if size > num_bytes:  # another process computes a checksum of the gap between two weights, too
            data[end + num_bytes : end + size].zero_()
        weights.append(weight)
        end += size
    if weights:
        yield WeightBucket(tuple(weights), staging.room(max_bytes)[:end])
