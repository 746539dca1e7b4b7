"""Messages in flight: their operations, where they arrive, and memory that must not be freed before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from leaderless.base.devices import can_pin

if TYPE_CHECKING:
    from leaderless.distributed.transport import ProcessGroup

MESSAGES_AHEAD = 8
"""Messages on an accelerator, in the middle of a pass, for which the host does not wait yet."""


class Mark(Protocol):
    """A place in the work of an accelerator, as torch's events are."""

    def query(self) -> bool:
        """Check whether the accelerator has come so far."""


class Operation(Protocol):
    """A message in flight, as torch's operations are."""

    def is_completed(self) -> bool:
        """Check whether it has been sent or received."""

    def wait(self) -> object:
        """Wait for it, or let what follows on an accelerator do so."""


def mark(device: torch.device) -> torch.Event:
    """Mark the place up to which work is queued on an accelerator."""
    event: torch.Event = torch.get_device_module(device).Event()
    event.record()
    return event


@dataclass
class Queued:
    """A message on which work of an accelerator depends up to a mark, though the host has not waited for it."""

    process_group: ProcessGroup
    what: str
    mark: Mark
    queued_s: float = field(default_factory=monotonic)


class Backlog(deque[Queued]):
    """Messages for which only the accelerator waits, in all process groups of a rank, in their order."""

    def add(self, process_group: ProcessGroup, what: str, device: torch.device, most: int) -> None:
        """Add a message on a device, and wait until at most some are left; a CPU has waited already."""
        if device.type != "cpu":
            self.append(Queued(process_group, what, mark(device)))
            self.wait(most)

    def wait(self, most: int = 0) -> None:
        """Wait on the host until at most some messages are left, the newest."""
        while len(self) > most:
            one = self.popleft()
            with one.process_group._waiting(one.what):  # noqa: SLF001
                one.process_group._poll(one.mark.query, one.queued_s)  # noqa: SLF001


@dataclass
class PendingMessage:
    """A message in flight.

    Attributes:
        process_group: Ranks of the message.
        what: Name of the message.
        works: Operations.
        values: Values that arrive, or that leave where none do.
        sent: Further memory that must not be freed before the message has left.
    """

    process_group: ProcessGroup
    what: str
    works: Sequence[Operation]
    values: Tensor
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """The values; what follows on their device comes after the message, so that memory may be used again."""
        self.process_group._order(self.works, self.what, self.values.device)  # noqa: SLF001
        return self.values


@dataclass
class RoundUnderWay:
    """A round in flight: its operations, where bytes arrive, and memory that must not be freed before.

    Attributes:
        works: Operations.
        received: Messages, each with the memory in which it arrives.
        sent: Memory that is sent.
        stays: Whether all messages are in the memory that the backend reads.
    """

    works: Sequence[Operation]
    received: Sequence[tuple[Tensor, Tensor]]
    sent: Sequence[Tensor]
    stays: bool


# An accelerator's bytes pass through pinned host memory, as copies from and to other host memory would block and be
# slower. Torch's allocator uses it again, once the copy is done.


def incoming(message: Tensor, device: torch.device) -> Tensor:
    """Memory on a device, to receive a message for host memory."""
    return message if message.device == device else torch.empty_like(message, device=device)


def outgoing(message: Tensor, device: torch.device) -> Tensor:
    """A message on a device."""
    if message.device == device:
        return message
    return (message.pin_memory() if can_pin(device.type) else message).to(device, non_blocking=True)


def fetch(received: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Copy received bytes into host memory; each pair is a message there and on the device, or both times the same."""
    received = [(message, there) for message, there in received if message is not there]
    if not received:
        return
    is_pinned = can_pin(device.type)
    buffers = [
        torch.empty_like(message, pin_memory=is_pinned).copy_(there, non_blocking=True) for message, there in received
    ]
    torch.accelerator.current_stream(device).synchronize()
    for (message, _), buffer in zip(received, buffers, strict=True):
        message.copy_(buffer)
