"""The stream of weights from a trainer to an engine: in buckets, each with a checksum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leaderless.config import Json
from leaderless.rollout.apart.messages import Piece, checksum

BUCKET_BYTES = 1 << 28
"""Weights travel in buckets of about this many bytes; a larger weight has one of its own."""
ALIGNMENT = 16
"""Each weight begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class Bucket:
    """Some weights, one behind the other.

    Attributes:
        pieces: What is where.
        data: [bytes] uint8; overwritten by the next bucket.
        checksum: Of the data.
    """

    pieces: tuple[Piece, ...]
    data: Tensor
    checksum: int


class Staging(Protocol):
    """Memory in which buckets are packed, and from which the engine takes them."""

    def room(self, num_bytes: int) -> Tensor:
        """At least so many bytes, the same ones as before where these are enough.

        Args:
            num_bytes: That are needed.

        Returns:
            [bytes] uint8.
        """

    def close(self) -> None:
        """Let go of the memory."""


def make_buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, staging: Staging, max_bytes: int = BUCKET_BYTES
) -> Iterator[Bucket]:
    """Pack weights; each bucket has to be taken before the next is asked for.

    Args:
        weights: By name, whole.
        dtype: That the engine computes in.
        staging: Where they are packed.
        max_bytes: Of a bucket with more than one weight.
    """
    pieces: list[Piece] = []
    end = 0
    for name, weight in weights:
        size = -(-weight.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if pieces and end + size > max_bytes:
            yield _bucket(pieces, staging.room(max_bytes)[:end])
            pieces, end = [], 0
        piece = Piece(name, str(dtype).removeprefix("torch."), tuple(weight.shape), end)
        data = staging.room(max(max_bytes, size))
        data[end : end + size].zero_()  # what lies between two weights is part of the checksum
        piece.view(data).copy_(weight)
        pieces.append(piece)
        end += size
    if pieces:
        yield _bucket(pieces, staging.room(max_bytes)[:end])


def _bucket(pieces: list[Piece], data: Tensor) -> Bucket:
    # The checksum waits for the copies on an accelerator, so that another process may read them from here on.
    return Bucket(tuple(pieces), data, checksum(data))


class LocalStaging:
    """Memory of this process, on any device."""

    def __init__(self, device: torch.device) -> None:
        """Take no memory yet.

        Args:
            device: Of the weights.
        """
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
        """How it finds the memory."""


class CudaStaging(LocalStaging):
    """Memory of a CUDA device, which other processes map by its IPC handle."""

    def __init__(self, device: torch.device) -> None:
        """Take no memory yet.

        Args:
            device: Of the weights.
        """
        super().__init__(device)
        self._place: Json = None

    def room(self, num_bytes: int) -> Tensor:
        """See `Staging`."""
        before, data = self._data, super().room(num_bytes)
        if data is not before:
            # Each handle counts as a use until it is opened, so there is one for all buckets.
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

    It has no name in any folder: no mount's size bounds it, and it is given back even if this process is killed.
    """

    def __init__(self) -> None:
        """Take no memory yet."""
        self._file: int | None = None
        self._data = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> Tensor:
        """See `Staging`."""
        if len(self._data) < num_bytes:
            self.close()
            self._file = os.memfd_create("leaderless-weights")
            os.posix_fallocate(self._file, 0, num_bytes)  # what is missing is said here, and not by a signal later
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
        """See `SharedStaging`. The number tells it from memory that had the same path before."""
        assert self._file is not None
        return {"file": self._path, "number": os.fstat(self._file).st_ino, "bytes": len(self._data)}
