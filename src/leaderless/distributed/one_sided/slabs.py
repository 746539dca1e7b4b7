"""Memory that stays registered, from which messages take places for a while.

To register memory takes time, and on some networks pins it, so each slab is registered once, when it is first needed,
and until the end. What is registered is therefore bounded, whatever is sent.
"""

from __future__ import annotations

from bisect import insort

import torch
from torch import Tensor

from leaderless.distributed.one_sided.library import BACKEND, NixlAgent

ALIGNMENT = 256
"""Bytes of which the first of each place is a multiple."""


class Slab:
    """Registered memory on one device.

    Attributes:
        memory: Its bytes, [size] uint8.
        kind: Kind of memory, as NIXL names it.
        device_number: Number of its device, as NIXL counts.
        metadata: Description for peers that read it.
    """

    def __init__(self, agent: NixlAgent, size: int, device: torch.device) -> None:
        """Allocate and register some bytes."""
        self._agent = agent
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        self.kind, self.device_number = ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index or 0)
        place = (self.memory.data_ptr(), size, self.device_number, "")
        self._registered = agent.register_memory([place], self.kind, [BACKEND])
        self.metadata = agent.get_partial_agent_metadata(self._registered, False, [BACKEND])
        self._free = [(0, size)]
        self._taken: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """Bytes in use."""
        return sum(self._taken.values())

    def take(self, size: int) -> int | None:
        """The first byte of a place of some bytes; None while there is no room."""
        size = -(-size // ALIGNMENT) * ALIGNMENT
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size:
                self._free[index : index + 1] = [(begin + size, end)] * (end - begin > size)
                self._taken[begin] = size
                return begin
        return None

    def give_back(self, begin: int) -> None:
        """Let a place be taken again."""
        insort(self._free, (begin, begin + self._taken.pop(begin)))
        merged: list[tuple[int, int]] = []
        for first, last in self._free:
            if merged and merged[-1][1] == first:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self._free = merged

    def place(self, begin: int, size: int) -> Tensor:
        """The bytes of a place."""
        return self.memory[begin : begin + size]

    def address(self, begin: int) -> int:
        """The address of a place."""
        return self.memory.data_ptr() + begin

    def deregister(self) -> None:
        """Take the memory back from the network; its bytes stay as they are."""
        self._agent.deregister_memory(self._registered, [BACKEND])
