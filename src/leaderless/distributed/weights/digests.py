"""Digests of weights that do not depend on how ranks have divided them.

    digest of a weight = odd number of its name * sum over its elements i of (2 i + 1) * bits of element i, mod 2^64
    digest of a model  = sum over its weights, mod 2^64

Each rank adds up the elements that it holds, on the device that holds them, and the ranks add up their sums. As with
the checksums of buckets, a single changed element always changes the sum. It finds mistakes and damage; it is no
cryptographic hash. That of a checkpoint's files is in the proof as well.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.distributed.weights.buckets import CHECKSUM_WORDS, DEVICE_CHECKSUM_WORDS

SMALL_WORDS, KEPT_WORDS = 1 << 16, 1 << 20
"""Most elements of a part that is added up together with others, and most multipliers that are kept, of 8 bytes."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightPart(NamedTuple):
    """A part of a weight that a rank holds.

    Attributes:
        name: Name of the weight.
        local: The part.
        offsets: Index of its first element in the whole weight.
        shape: Shape of the whole weight.
    """

    name: str
    local: Tensor
    offsets: Sequence[int]
    shape: Sequence[int]


def is_weight(name: str) -> bool:
    """Whether a tensor of an engine's state is a weight, rather than what the optimizer keeps."""
    return not name.startswith("optimizer.")


class _Together(NamedTuple):
    """Small parts of one device and size of elements, and memory that is kept, as new pages would take longer.

    Attributes:
        parts: Elements of each part as integers.
        bits: Room for all of them, one after the other.
        words: Room for the same as int64.
        multipliers: Number by which each is multiplied.
    """

    parts: Sequence[Tensor]
    bits: Tensor
    words: Tensor
    multipliers: Tensor

    @classmethod
    def of(cls, parts: Sequence[WeightPart]) -> _Together:
        """Make room for parts."""
        bits = [_bits(part) for part in parts]
        together = torch.cat(bits)
        return cls(bits, together, together.to(torch.int64), torch.cat([*map(_multipliers, parts)]))

    def sum(self) -> Tensor:
        """The sum over the parts as they are now, int64."""
        torch.cat([*self.parts], out=self.bits)
        return self.words.copy_(self.bits).mul_(self.multipliers).sum()


class WeightsDigest:
    """Digest of some parts of weights, in the memory that training changes.

    Small parts are added up together, by multipliers that are kept: there may be hundreds of them.
    """

    def __init__(self, parts: Iterable[WeightPart]) -> None:
        """Prepare for the parts, which stay where they are."""
        self._large: list[WeightPart] = []
        self._blocks: dict[torch.device, _Block] = {}
        small: dict[tuple[torch.device, int], list[WeightPart]] = {}
        room = KEPT_WORDS
        for part in parts:
            local = part.local
            if local.numel() > min(SMALL_WORDS, room) or not local.is_contiguous():
                self._large.append(part)
                self._blocks.setdefault(local.device, _Block(local.device))
            elif local.numel():
                room -= local.numel()
                small.setdefault((local.device, local.element_size()), []).append(part)
        self._small = [_Together.of(some) for some in small.values()]

    def value(self) -> int:
        """The sum over the parts as they are now, from 0 to 2^64 - 1; the host waits for each device once."""
        sums: dict[torch.device, list[Tensor]] = {}
        for part in self._large:
            device = part.local.device
            sums.setdefault(device, []).append(self._blocks[device].sum(part) * _factor(part.name))
        for some in self._small:
            sums.setdefault(some.words.device, []).append(some.sum())
        return sum(sum(torch.stack(values).tolist()) for values in sums.values()) % (1 << 64)


def weights_digest(parts: Iterable[WeightPart]) -> int:
    """The digest of some parts; see `WeightsDigest`."""
    return WeightsDigest(parts).value()


def _factor(name: str) -> int:
    """Odd number of a weight, as int64."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) | 1


def _multipliers(part: WeightPart) -> Tensor:
    """The number by which each element of a part is multiplied, [elements] int64."""
    starts, size = _runs(part)
    places = starts[:, None] + torch.arange(size, device=starts.device)
    return (2 * places.reshape(-1) + 1) * _factor(part.name)


def _runs(part: WeightPart) -> tuple[Tensor, int]:
    """Where each run of consecutive elements of the whole weight begins, [runs] int64, and how many a run has."""
    shape, whole = part.local.shape, tuple(part.shape)
    divided = [dim for dim in range(len(shape)) if shape[dim] != whole[dim]]
    dim = divided[-1] if divided else 0
    strides = [math.prod(whole[place + 1 :]) for place in range(len(shape))]
    starts = torch.zeros(1, dtype=torch.int64, device=part.local.device)
    for place in range(dim):
        own = torch.arange(shape[place], device=starts.device) + part.offsets[place]
        starts = (starts[:, None] + own * strides[place]).reshape(-1)
    if len(shape):
        starts = starts + part.offsets[dim] * strides[dim]
    return starts, math.prod(shape[dim:])


class _Block:
    """Memory of a device in which the elements of large parts are added up block by block."""

    def __init__(self, device: torch.device) -> None:
        size = CHECKSUM_WORDS if device.type == "cpu" else DEVICE_CHECKSUM_WORDS
        self._words = torch.empty(size, dtype=torch.int64, device=device)
        self._odd = torch.arange(1, 2 * size, 2, device=device)

    def sum(self, part: WeightPart) -> Tensor:
        """The sum over the elements of a part, int64, without the number of its name."""
        starts, size = _runs(part)
        runs, most = _bits(part).view(-1, size), len(self._words)
        total = torch.zeros((), dtype=torch.int64, device=runs.device)
        rows = max(1, most // size)
        for some, begin in zip(torch.split(runs, rows), torch.split(starts, rows), strict=True):
            for number, block in enumerate(torch.split(some, most, dim=1)):
                words = self._words[: block.numel()].view(block.shape).copy_(block)
                total += 2 * ((begin + number * most) * words.sum(1)).sum()
                total += words.mul_(self._odd[: block.shape[1]]).sum()
        return total


def _bits(part: WeightPart) -> Tensor:
    """The elements of a part as integers, [elements]."""
    local = part.local.detach().contiguous()
    return local.view(_BITS[local.element_size()]).reshape(-1)
