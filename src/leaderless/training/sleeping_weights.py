"""Weights that no update changes, and that take memory only while something computes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leaderless.base.devices import trim_host_memory
from leaderless.base.scratch_files import ScratchFile
from leaderless.config import RecipeError
from leaderless.config.models import Offload
from leaderless.distributed.weights.copies import host_memory
from leaderless.distributed.weights.files import bytes_of
from leaderless.training.optimizers.state_memory import HOST_ON_CPU


class SleepingWeights:
    """The weights of a model that is only scored, in host memory or in a file while they are not used.

    Storages are emptied, so that all tensors in them stay what they are, also those that FSDP has made of parameters.
    """

    def __init__(self, model: nn.Module, device: torch.device, offload: Offload, folder: Path) -> None:
        """Copy all weights, and put them to sleep.

        Raises:
            RecipeError: The CPU computes, and weights are to be in host memory; or nothing can be written to the
                folder, or too little.
        """
        if offload == "host" and device.type == "cpu":
            raise RecipeError.at("training.offload_frozen", HOST_ON_CPU)
        self._device, self._num_users = device, 0
        self._storages = _storages(model)
        self._sizes = [one.nbytes() for one in self._storages]
        copies = [_content(one, device) for one in self._storages]
        self._copies: _Copies = _HostCopies(copies) if offload == "host" else _FileCopies(copies, folder)
        del copies
        self._sleep()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Have the weights on the device for a while."""
        if not self._num_users:
            for place, (storage, size) in enumerate(zip(self._storages, self._sizes, strict=True)):
                storage.resize_(size)
                self._copies.read(place, _content(storage, self._device))
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._sleep()

    def _sleep(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        if self._device.type == "cpu":
            trim_host_memory()


class _Copies(ABC):
    """Copies of weights, by their places."""

    @abstractmethod
    def read(self, place: int, into: Tensor) -> None:
        """Write a copy to memory of as many bytes on the device."""


class _HostCopies(_Copies):
    """Copies in host memory, pinned where the device can read it by itself."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        kind = weights[0].device.type if weights else "cpu"
        self._places = [*host_memory([len(one) for one in weights], kind)]
        for place, one in zip(self._places, weights, strict=True):
            place.copy_(one)

    def read(self, place: int, into: Tensor) -> None:
        into.copy_(self._places[place], non_blocking=True)


class _FileCopies(_Copies):
    """Copies in a file without a name."""

    def __init__(self, weights: Sequence[Tensor], folder: Path) -> None:
        self._file, self._begins = ScratchFile(folder, sum(map(len, weights))), list[int]()
        begin = 0
        for one in weights:
            self._begins.append(begin)
            here = one.cpu()
            self._file.write(bytes_of(here), begin)
            begin += len(one)

    def read(self, place: int, into: Tensor) -> None:
        here = into if into.is_cpu else torch.empty(len(into), dtype=torch.uint8)
        self._file.read(bytes_of(here), self._begins[place])
        if here is not into:
            into.copy_(here)


def _storages(model: nn.Module) -> list[torch.UntypedStorage]:
    """The memory of all weights, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()  # it was mapped from the file of the model
        local = parameter.detach()
        storage = (local.to_local() if isinstance(local, DTensor) else local).untyped_storage()
        if storage.nbytes() and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return [*found.values()]


def _content(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """The bytes of a storage, [size] uint8."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
