"""Inputs of layers that wait elsewhere for the backward pass, which computes the layers again.

    forward      layer 0   layer 1   layer 2          backward    layer 2   layer 1   layer 0
    elsewhere           0 ->      1 ->      2 ->                2 <-   1 <-     0 <-

An accelerator copies in both directions while it computes: an input leaves while its own layer computes, and comes back
while the layer after it goes backward. A CPU writes and reads a file.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from leaderless.base.devices import can_pin
from leaderless.base.scratch_files import ScratchFile
from leaderless.distributed.weights.files import bytes_of


class KeptInput(ABC):
    """An input that is elsewhere, as long as this object exists."""

    @abstractmethod
    def fetch(self) -> Tensor:
        """The input, on its device, to be used now."""


class InputMemory(ABC):
    """Memory for inputs of layers."""

    @abstractmethod
    def keep(self, value: Tensor) -> KeptInput:
        """Keep a tensor that nothing changes, in the order of the forward pass."""


class InputsInFile(InputMemory):
    """Inputs of layers that a CPU computes, in a file without a name."""

    def __init__(self, folder: Path) -> None:
        """Make an empty file.

        Raises:
            RecipeError: The folder cannot be written to.
        """
        self._file, self._end, self._num_kept = ScratchFile(folder), 0, 0

    def keep(self, value: Tensor) -> KeptInput:
        """Write a tensor.

        Raises:
            RecipeError: The folder has too little room.
        """
        data = bytes_of(value.detach().contiguous())
        self._file.write(data, self._end)
        kept = _InFile(self._file, self._end, value)
        self._end, self._num_kept = self._end + len(data), self._num_kept + 1
        weakref.finalize(kept, self._forget)
        return kept

    def _forget(self) -> None:
        self._num_kept -= 1
        if not self._num_kept:  # the backward pass is over, and the next forward pass writes from the beginning
            self._end = 0


class _InFile(KeptInput):
    def __init__(self, file: ScratchFile, begin: int, like: Tensor) -> None:
        self._file, self._begin, self._shape, self._dtype = file, begin, like.shape, like.dtype

    def fetch(self) -> Tensor:
        found = torch.empty(self._shape, dtype=self._dtype)
        self._file.read(bytes_of(found), self._begin)
        return found


class InputsOnHost(InputMemory):
    """Inputs of layers that an accelerator computes, in memory of the host, pinned if it can read that by itself."""

    def __init__(self, device: torch.device) -> None:
        """Make streams for copies in both directions."""
        self.device = device
        self.module: ModuleType = torch.get_device_module(device)
        self.entering, self.leaving = self.module.Stream(), self.module.Stream()
        self._last: weakref.ref[_OnHost] | None = None

    def keep(self, value: Tensor) -> KeptInput:
        """Begin to copy a tensor to the host."""
        kept = _OnHost(self, value.detach(), self._last)
        self._last = weakref.ref(kept)
        return kept


class _OnHost(KeptInput):
    def __init__(self, memory: InputsOnHost, value: Tensor, before: weakref.ref[_OnHost] | None) -> None:
        self._memory, self._before, module = memory, before, memory.module
        self._place = torch.empty_like(value, device="cpu", pin_memory=can_pin(memory.device.type))
        memory.leaving.wait_stream(module.current_stream())
        with module.stream(memory.leaving):
            self._place.copy_(value, non_blocking=True)
            self._left = module.Event()
            self._left.record(memory.leaving)
        _used_by(value, memory.leaving)
        self._found: Tensor | None = None
        self._arrived = module.Event()

    def begin(self) -> None:
        """Begin to copy it back, unless that is done."""
        if self._found is None:
            memory = self._memory
            with memory.module.stream(memory.entering):
                memory.entering.wait_event(self._left)
                self._found = torch.empty_like(self._place, device=memory.device)
                self._found.copy_(self._place, non_blocking=True)
                self._arrived.record(memory.entering)

    def fetch(self) -> Tensor:
        self.begin()
        found, self._found = self._found, None
        assert found is not None
        if self._before is not None and (before := self._before()) is not None:
            before.begin()  # it is needed next
        now = self._memory.module.current_stream()
        now.wait_event(self._arrived)
        _used_by(found, now)
        return found


def _used_by(value: Tensor, stream: torch.Stream) -> None:
    """Keep memory from being given to others before a stream has used it."""
    if value.device.type != "cpu":
        value.record_stream(stream)


def input_memory(device: torch.device, folder: Path) -> InputMemory:
    """Memory for inputs of layers that a device computes; files are made in a folder."""
    return InputsInFile(folder) if device.type == "cpu" else InputsOnHost(device)
