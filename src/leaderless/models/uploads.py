"""Copies of small tensors from the host to an accelerator, many in one, for which the host does not wait, and back.

A plain copy waits until the device has done all that it was asked to do before: it would stand still while the host
prepares the next pass. Here tensors are collected in pinned memory, which the device reads when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.base.devices import can_pin, indexed

PAGE_BYTES = 1 << 22
"""Bytes of the memory in which tensors are collected, if they are not larger."""
ALIGNMENT_BYTES = 256
"""Tensors begin at multiples of it, as where torch allocates them on accelerators."""


@dataclass
class _Page:
    """Memory of the host and of a device; the bytes between `sent` and `used` are still to be copied."""

    host: Tensor
    there: Tensor
    used: int = 0
    sent: int = 0


class _Upload:
    """Tensors on their way to a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pages: list[_Page] = []

    def place(self, tensor: Tensor) -> Tensor:
        """Give a tensor on the device whose numbers are there after `send`."""
        size, pages = tensor.nbytes, self._pages
        if not pages or len(pages[-1].host) - pages[-1].used < size:
            room = max(size, PAGE_BYTES)
            there = torch.empty(room, dtype=torch.uint8, device=self.device)
            # Torch does not use pinned memory again before the copies from it are done.
            pages.append(_Page(torch.empty(room, dtype=torch.uint8, pin_memory=can_pin(self.device.type)), there))
        page = pages[-1]
        own = slice(page.used, page.used + size)
        page.used = min(len(page.host), -(-own.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        page.host[own].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        # Not a view to autograd: a change of one tensor in place does not concern the others.
        return page.there[own].view(tensor.dtype).view(tensor.shape).data

    def send(self) -> None:
        """Have what is new copied before the device computes anything else."""
        for page in self._pages:
            own = slice(page.sent, page.used)
            if page.used > page.sent:
                page.there[own].copy_(page.host[own], non_blocking=True)
                page.sent = page.used


_UNDER_WAY: ContextVar[_Upload | None] = ContextVar("upload", default=None)


@contextmanager
def one_copy(device: torch.device) -> Iterator[None]:
    """Copy all that is `placed` on a device within the block at its end: nothing may compute with it before.

    What an outer block has collected is copied as well.
    """
    if device.type == "cpu":
        yield
        return
    device, upload = indexed(device), _UNDER_WAY.get()
    if upload is not None and upload.device != device:
        yield
        return
    upload = upload or _Upload(device)
    before = _UNDER_WAY.set(upload)
    try:
        yield
    finally:
        _UNDER_WAY.reset(before)
    upload.send()


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device: at the end of the block of `one_copy`, or at once without one."""
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    upload = _UNDER_WAY.get()
    if upload is not None and upload.device == indexed(device):
        return upload.place(tensor)
    if not can_pin(device.type):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def constants(like: Tensor, *values: Sequence[float] | NDArray[np.generic] | Tensor) -> list[Tensor]:
    """Numbers of the host on the device of a tensor, in one copy; outside of other blocks of `one_copy`."""
    if like.is_meta:
        return [torch.as_tensor(one).to(like.device) for one in values]
    with one_copy(like.device):
        return [placed(torch.as_tensor(one), like.device) for one in values]


def read_back(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one device on the host, in one copy, for which it waits; on the host they are the same ones."""
    if all(one.device.type == "cpu" for one in tensors):
        return [*tensors]
    return _read_together(tensors)


def _read_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors on the host, by way of their bytes one after the other."""
    together = torch.cat([one.contiguous().flatten().view(torch.uint8) for one in tensors]).cpu()
    parts = torch.split(together, [one.nbytes for one in tensors])
    # Copies, since a part may begin at an odd place for its type.
    return [part.clone().view(one.dtype).view(one.shape) for part, one in zip(parts, tensors, strict=True)]
