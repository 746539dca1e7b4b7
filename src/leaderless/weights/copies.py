"""Copies of weights in host memory, which are sent while training changes the originals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from leaderless.weights.blocks import HeldWeights


@dataclass(frozen=True)
class PendingCopy:
    """Copies that an accelerator may still be making: it changes no weight before, as it works in order.

    Attributes:
        held: The copies.
        done: Place in the work of the accelerator after them; None on a CPU.
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

    The host does not wait for an accelerator, which converts weights and writes them to one block of pinned memory.
    """
    weights = list(held.weights.values())
    device = next((weight.local.device for weight in weights), torch.device("cpu"))
    is_on_host = device.type == "cpu"
    room = torch.empty(sum(weight.local.numel() for weight in weights), dtype=dtype, pin_memory=not is_on_host)
    places = torch.split(room, [weight.local.numel() for weight in weights])
    copies = []
    for weight, place in zip(weights, places, strict=True):
        copy = place.view(weight.local.shape)
        # Torch converts on the CPU what crosses to it, in pageable memory, and waits.
        copy.copy_(weight.local if is_on_host else weight.local.to(dtype), non_blocking=True)
        copies.append(replace(weight, local=copy))
    done = None
    if not is_on_host:
        done = torch.get_device_module(device).Event()
        done.record()
    return PendingCopy(HeldWeights.of(copies, held.policy_version), done)
