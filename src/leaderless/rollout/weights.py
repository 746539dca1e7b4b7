"""Sends weights from a trainer to an engine, in buckets that each have a checksum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leaderless.config import Json
from leaderless.rollout.apart.messages import PackedWeight, checksum

BUCKET_BYTES = 1 << 28
"""Most bytes of a bucket; a larger weight has a bucket of its own."""
ALIGNMENT = 16
"""Divisor of the offset at which each weight begins, in bytes."""


@dataclass(frozen=True)
class WeightBucket:
    """Weights that are sent together, one after the other.

    Attributes:
        weights: Weights in the bucket.
        data: [bytes] uint8; overwritten by the next bucket.
        checksum: Checksum of the data.
    """

    weights: tuple[PackedWeight, ...]
    data: Tensor
    checksum: int


class Staging(Protocol):
    """Memory in which buckets are packed and from which the engine reads them."""

    def room(self, num_bytes: int) -> Tensor:
        """Give [bytes] uint8, at least as many as asked for; the same memory as before if it is large enough."""

    def close(self) -> None:
        """Release the memory."""


def make_buckets(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, staging: Staging, max_bytes: int = BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """Pack weights. The caller has to use each bucket before it asks for the next.

    Args:
        named: Whole weights with their names.
        dtype: Type in which the engine computes.
        staging: Memory for the buckets.
        max_bytes: Most bytes of a bucket with more than one weight.
    """
    weights: list[PackedWeight] = []
    end = 0
    for name, tensor in named:
        size = -(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if weights and end + size > max_bytes:
            yield _bucket(weights, staging.room(max_bytes)[:end])
            weights, end = [], 0
        weight = PackedWeight(name, str(dtype).removeprefix("torch."), tuple(tensor.shape), end)
        data = staging.room(max(max_bytes, size))
        data[end : end + size].zero_()  # the gap between two weights is part of the checksum
        weight.view(data).copy_(tensor)
        weights.append(weight)
        end += size
    if weights:
        yield _bucket(weights, staging.room(max_bytes)[:end])


def _bucket(weights: list[PackedWeight], data: Tensor) -> WeightBucket:
    # The checksum waits for copies on an accelerator, so that another process may read the bucket from now on.
    return WeightBucket(tuple(weights), data, checksum(data))


class LocalStaging:
    """Memory of this process, on any device."""

    def __init__(self, device: torch.device) -> None:
        """Allocate no memory yet."""
        self._device = device
        self._data = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """See `Staging`."""
        if len(self._data) < num_bytes:
            self._data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._data

    def close(self) -> None:
        """See `Staging`."""
        self._data = torch.empty(0, dtype=torch.uint8)


class SharedStaging(Staging, Protocol):
    """Memory that an engine in another process of this machine can map."""

    def place(self) -> Json:
        """Give what the engine needs to find the memory."""


class CudaStaging(LocalStaging):
    """Memory of a CUDA device that other processes map by its IPC handle."""

    def __init__(self, device: torch.device) -> None:
        """Allocate no memory yet."""
        super().__init__(device)
        self._place: Json = None

    def room(self, num_bytes: int) -> Tensor:
        """See `Staging`."""
        before, data = self._data, super().room(num_bytes)
        if data is not before:
            # Each handle counts as a use until it is opened, so all buckets share one.
            _, handle, size, offset, counter, place, event, has_event = data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            self._place = {
                "handle": handle.hex(),
                "bytes": size,
                "offset": offset,
                "counter": counter.hex(),
                "counter_offset": place,
                "event": event.hex(),
                "has_event": has_event,
            }
        return data

    def place(self) -> Json:
        """See `SharedStaging`."""
        return self._place


class HostStaging:
    """Host memory that other processes of the same user can map.

    It has no name in any folder: no mount limits its size, and it is released even if this process is killed.
    """

    def __init__(self) -> None:
        """Allocate no memory yet."""
        self._file: int | None = None
        self._data = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """See `Staging`."""
        if len(self._data) < num_bytes:
            self.close()
            self._file = os.memfd_create("leaderless-weights")
            os.posix_fallocate(self._file, 0, num_bytes)  # lack of memory is an error here, not a signal later
            self._data = torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)
        return self._data

    @property
    def _path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """See `Staging`."""
        self._data = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def place(self) -> Json:
        """See `SharedStaging`. The inode number distinguishes it from earlier memory under the same path."""
        assert self._file is not None
        return {"file": self._path, "number": os.fstat(self._file).st_ino, "bytes": len(self._data)}
