"""Where numbers that an optimizer keeps lie between updates: on the device, in host memory, or in a file.

    host or file    m0 m1 m2 m3 m4 ...            groups of weights, whose states have about `GROUP_BYTES`
                     |  in     ^ out
    device          [a]  [b]  [c]                 three rooms: one is read, one changes weights, one is written
    time            in 0 | step 0, in 1 | out 0, step 1, in 2 | ...

On the CPU, states in a file are read and written where they are mapped, and its pages are given back group by group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.base.scratch_files import MappedFile, expect_pages, release_pages
from leaderless.config import RecipeError
from leaderless.config.models import OptimizerConfig
from leaderless.distributed.weights.blocks import Shape
from leaderless.distributed.weights.copies import host_memory
from leaderless.planner.memory.limits import STATE_GROUP_BYTES, STATE_ROOMS

ALIGNMENT = 256
"""Bytes at whose multiples tensors begin."""

Kept = Mapping[str, Tensor]
"""Numbers that are kept of this rank's part of a weight, by kind."""


class StateSpec(NamedTuple):
    """Shape and type of the numbers of one kind of a weight."""

    sizes: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return prod(self.sizes) * self.dtype.itemsize


class StateMemory(ABC):
    """Memory for what an optimizer keeps."""

    @abstractmethod
    def zeros(self, specs: Sequence[StateSpec]) -> Sequence[Tensor]:
        """Zeros of some shapes and types, which stay where they are."""

    @abstractmethod
    def groups(self, kept: Sequence[Kept]) -> Iterator[tuple[range, Sequence[Kept]]]:
        """Yield states of one group of weights after the other, on the device, with their places among all.

        What is written to a group is kept, until the next one is asked for; so the last one has to be asked for, too.
        """


class StatesOnDevice(StateMemory):
    """States that are always on the device."""

    def __init__(self, device: torch.device) -> None:
        """Make none yet."""
        self._device = device

    def zeros(self, specs: Sequence[StateSpec]) -> Sequence[Tensor]:
        """Zeros on the device."""
        return [torch.zeros(one.sizes, dtype=one.dtype, device=self._device) for one in specs]

    def groups(self, kept: Sequence[Kept]) -> Iterator[tuple[range, Sequence[Kept]]]:
        """All of them at once."""
        yield range(len(kept)), kept


class StatesInFile(StateMemory):
    """States of a rank on the CPU that are mapped from a file without a name."""

    def __init__(self, folder: Path) -> None:
        """Make no file yet."""
        self._folder, self._files = folder, list[MappedFile]()

    def zeros(self, specs: Sequence[StateSpec]) -> Sequence[Tensor]:
        """Zeros in a new file.

        Raises:
            RecipeError: The folder cannot be written to, or is too small.
        """
        begins, end = list[int](), 0
        for one in specs:
            begins.append(end)
            end += -(-one.num_bytes // ALIGNMENT) * ALIGNMENT
        self._files.append(MappedFile(self._folder, end))
        whole = torch.frombuffer(self._files[-1].memory, dtype=torch.uint8)
        return [
            whole[begin : begin + one.num_bytes].view(one.dtype).view(one.sizes)
            for begin, one in zip(begins, specs, strict=True)
        ]

    def groups(self, kept: Sequence[Kept]) -> Iterator[tuple[range, Sequence[Kept]]]:
        """Each in the memory of the file, which the system may take back afterwards."""
        groups = split(kept)
        for place, group in enumerate(groups):
            for one in _tensors(kept, groups[place + 1]) if place + 1 < len(groups) else ():
                expect_pages(one.data_ptr(), one.nbytes)
            yield group, [kept[i] for i in group]
            for one in _tensors(kept, group):
                release_pages(one.data_ptr(), one.nbytes)


class StagedStates(StateMemory):
    """States that pass through an accelerator group by group, from pinned host memory or from a file, and back.

    Copies in both directions run next to the updates, each in a stream of its own. Three rooms on the device are there
    during a step only.
    """

    def __init__(self, device: torch.device, files: StatesInFile | None = None) -> None:
        """Make none yet; without files, they are in host memory, pinned where the device can read it by itself."""
        self._device, self._files = device, files

    def zeros(self, specs: Sequence[StateSpec]) -> Sequence[Tensor]:
        """Zeros in host memory, or in a file."""
        if self._files is not None:
            return self._files.zeros(specs)
        places = host_memory([one.num_bytes for one in specs], self._device.type)
        return [place.zero_().view(one.dtype).view(one.sizes) for one, place in zip(specs, places, strict=True)]

    def groups(self, kept: Sequence[Kept]) -> Iterator[tuple[range, Sequence[Kept]]]:
        """Each in a room of the device; all are written back when the last one is done."""
        device: ModuleType = torch.get_device_module(self._device)
        groups = split(kept)
        most = max((sum(map(_room_bytes, _tensors(kept, one))) for one in groups), default=0)
        rooms = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in groups[:STATE_ROOMS]]
        now, entering, leaving = device.current_stream(), device.Stream(), device.Stream()
        entering.wait_stream(now)  # which may still use the memory that the rooms have got
        arrived, left, inside = list[torch.Event](), list[torch.Event](), list[Sequence[Kept]]()

        def enter(place: int) -> None:
            with device.stream(entering):
                if place >= len(rooms):
                    entering.wait_event(left[place - len(rooms)])
                inside.append([*_copies(kept, groups[place], rooms[place % len(rooms)])])
                arrived.append(_marked(device, entering))

        for place, group in enumerate(groups):
            for following in range(len(arrived), min(place + 2, len(groups))):
                enter(following)
            now.wait_event(arrived[place])
            yield group, inside[place]
            leaving.wait_event(_marked(device, now))
            with device.stream(leaving):
                for i, copies in zip(group, inside[place], strict=True):
                    for kind, copy in copies.items():
                        kept[i][kind].copy_(copy, non_blocking=True)
                left.append(_marked(device, leaving))
            inside[place] = ()
            if place and self._files is not None:
                self._release(kept, groups[place - 1], left[place - 1])
        if groups:
            left[-1].synchronize()  # who reads states next, may do it on the host
            self._release(kept, groups[-1], left[-1])

    def _release(self, kept: Sequence[Kept], group: range, done: torch.Event) -> None:
        """Give back pages of a file that has been written."""
        if self._files is None:
            return
        done.synchronize()
        for one in _tensors(kept, group):
            release_pages(one.data_ptr(), one.nbytes)


def memory_for(config: OptimizerConfig, device: torch.device, folder: Path) -> StateMemory:
    """The memory that settings name, for weights on a device; files are made in a folder.

    Raises:
        RecipeError: States of weights on a CPU are in host memory already.
    """
    if config.offload == "none":
        return StatesOnDevice(device)
    if config.offload == "host":
        if device.type == "cpu":
            raise RecipeError.at("optimizer.offload", HOST_ON_CPU)
        return StagedStates(device)
    files = StatesInFile(folder)
    return files if device.type == "cpu" else StagedStates(device, files)


HOST_ON_CPU = "is host, but the CPU computes, so that everything is in host memory already: set disk, or leave it out"


def split(kept: Sequence[Kept]) -> list[range]:
    """Divide weights in their order into groups with few bytes, or with one weight each."""
    groups, size = list[range](), 0
    for place, one in enumerate(kept):
        own = sum(map(_room_bytes, one.values()))
        if groups and size + own <= STATE_GROUP_BYTES:
            groups[-1], size = range(groups[-1].start, place + 1), size + own
        else:
            groups.append(range(place, place + 1))
            size = own
    return groups


def _room_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _tensors(kept: Sequence[Kept], group: range) -> Sequence[Tensor]:
    return [tensor for place in group for tensor in kept[place].values()]


def _copies(kept: Sequence[Kept], group: range, room: Tensor) -> Iterator[Kept]:
    """Copy the states of a group into a room."""
    begin = 0
    for place in group:
        copies = {}
        for kind, one in kept[place].items():
            copy = room[begin : begin + one.nbytes].view(one.dtype).view(one.shape)
            copies[kind] = copy.copy_(one, non_blocking=True)
            begin += _room_bytes(one)
        yield copies


def _marked(device: ModuleType, stream: torch.Stream) -> torch.Event:
    """The place up to which work is queued in a stream."""
    event: torch.Event = device.Event()
    event.record(stream)
    return event
