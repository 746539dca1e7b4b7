"""Copies of weights in host memory: those that are sent while training changes the originals, and those that come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leaderless.base.devices import can_pin
from leaderless.distributed.in_flight import mark
from leaderless.distributed.weights.blocks import HeldWeights
from leaderless.distributed.weights.buckets import ALIGNMENT
from leaderless.planner.memory.limits import PINNED_BYTES


@dataclass(frozen=True)
class PendingCopy:
    """Copies that an accelerator may still be making: it changes no weight before, as it works in order.

    `done` is the place in its work after them; None on a CPU.
    """

    held: HeldWeights
    done: torch.Event | None

    def wait(self) -> HeldWeights:
        """The copies, once they are there; any thread may wait."""
        if self.done is not None:
            self.done.synchronize()
        return self.held


def begin_copy(held: HeldWeights, dtype: torch.dtype) -> PendingCopy:
    """Begin to copy weights to host memory, in the type in which they are sent.

    The host does not wait for an accelerator, which converts weights and writes them to pinned memory, if it can.
    """
    weights = list(held.weights.values())
    device = next((weight.local.device for weight in weights), torch.device("cpu"))
    is_on_host = device.type == "cpu"
    places = host_memory([weight.local.numel() * dtype.itemsize for weight in weights], device.type)
    copies = []
    for weight, place in zip(weights, places, strict=True):
        copy = place.view(dtype).view(weight.local.shape)
        # Torch converts on the CPU what crosses to it, in pageable memory, and waits.
        copy.copy_(weight.local if is_on_host else weight.local.to(dtype), non_blocking=True)
        copies.append(replace(weight, local=copy))
    return PendingCopy(HeldWeights.of(copies, held.policy_version), None if is_on_host else mark(device))


def collected(
    named: Iterable[tuple[str, Tensor]], sizes: Iterable[int], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Copy weights, whose sizes in bytes are known, to memory as of `host_memory`."""
    for (name, tensor), place in zip(named, host_memory(sizes, device.type), strict=True):
        yield name, place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def host_memory(sizes: Iterable[int], device_type: str) -> Iterator[Tensor]:
    """Give memory of the host for tensors of some sizes in bytes, as [size] uint8, which a device reads if it can.

    Torch rounds blocks up to powers of two and keeps them: few large ones waste little, and are there the next time.
    """
    sizes = [*sizes]
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    room, begin, num_left = torch.empty(0, dtype=torch.uint8), 0, sum(aligned)
    for size, taken in zip(sizes, aligned, strict=True):
        if begin + taken > len(room):
            begin, num_bytes = 0, max(taken, min(PINNED_BYTES, num_left))
            room = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=can_pin(device_type))
        yield room[begin : begin + size]
        begin, num_left = begin + taken, num_left - taken
