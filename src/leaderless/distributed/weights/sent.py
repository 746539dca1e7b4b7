"""The numbers that a rank has sent last, from which it sends differences, and how many bytes it has sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from leaderless.distributed.weights.copies import host_memory

NO_VERSION = -1
"""Version of weights that nobody has sent or received so far."""

MessagePlace = tuple[int, int]
"""Number of a bucket, and the rank that receives a message of it."""


@dataclass(frozen=True)
class Traffic:
    """The messages in which a rank has sent weights.

    Attributes:
        num_bytes: Bytes that were sent.
        whole_bytes: Bytes of the same messages with all numbers.
        num_changed: Numbers that differ from those that were sent before.
        num_compared: Numbers that were compared; none where all were sent.
        seconds: Seconds until all were sent, with waits for the ranks that receive them.
    """

    num_bytes: int = 0
    whole_bytes: int = 0
    num_changed: int = 0
    num_compared: int = 0
    seconds: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


class SentWeights:
    """The numbers that a rank has sent last, as they lie in messages, in host memory.

    So a rank keeps each number once for each rank to which it sends it, and none that others send.

    Attributes:
        policy_version: Version of the weights; `NO_VERSION` before all of some are sent.
    """

    def __init__(self) -> None:
        self.policy_version = NO_VERSION
        self._numbers: dict[MessagePlace, Tensor] = {}

    def open(self, sizes: Mapping[MessagePlace, int], device: torch.device) -> None:
        """Take memory for messages of some bytes, once; a device reads and writes it if it can."""
        if not self._numbers:
            self._numbers = dict(zip(sizes, host_memory(sizes.values(), device.type), strict=True))

    def numbers(self, place: MessagePlace, device: torch.device) -> Tensor:
        """The numbers of a message, [bytes] uint8, on a device."""
        return self._numbers[place].to(device, non_blocking=True)

    def keep(self, place: MessagePlace, numbers: Tensor) -> None:
        """Replace the numbers of a message; work on their device that reads the earlier ones comes before."""
        self._numbers[place].copy_(numbers, non_blocking=True)
