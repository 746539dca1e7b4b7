"""Keys and values of the tokens that are being decoded: runs of tokens in slots, and slots sorted by size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from torch import Tensor

SMALLEST_SLOT = 64
"""Tokens of the smallest slots; each size is twice the one before it."""

MOST_SPARE_SLOTS = 64
"""Where slots of a size run out, their number doubles, but grows by no more than this beyond what is needed."""

LayerKeysValues = tuple[Tensor, Tensor]
_allocations = count(1)


@dataclass(eq=False)
class Run:
    """Tokens one behind the other, whose keys and values lie in a slot.

    Attributes:
        length: Tokens, with those that the pass under way writes.
        home: The slots of its size.
        slot: Which of them.
    """

    length: int
    home: Slots
    slot: int


class Slots:
    """Slots of one size; the first ones are taken, without a gap.

    Keys and values are [kv_heads, slots, tokens, head_dim], so that what one head reads of a run lies side by side.
    They are 0 where nothing was written: what is masked is multiplied by 0 all the same, which only numbers survive.
    """

    def __init__(self, capacity: int, shapes: dict[int, LayerKeysValues], multiple: int) -> None:
        """Describe them; memory is taken with the first runs, and `allocation` tells it from other memory.

        Args:
            capacity: Tokens that fit into a slot.
            shapes: By layer, empty tensors with the heads and the type of keys and values, once they are known.
            multiple: Of which the number of slots is one.
        """
        self.capacity, self.runs = capacity, list[Run]()
        self._shapes, self._multiple = shapes, multiple
        self._layers: dict[int, LayerKeysValues] = {}
        self._num_slots = 0
        self.allocation = 0

    def layer(self, layer: int) -> LayerKeysValues:
        """Keys and values of a layer.

        Args:
            layer: Its number.
        """
        if layer not in self._layers:  # of the first pass, which makes the shapes known
            self._layers[layer] = self._room(layer)
        return self._layers[layer]

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Put keys and values of tokens where they belong.

        Args:
            layer: Its number.
            places: [n] int64, slot times capacity plus the place in the slot.
            key: [n, kv_heads, head_dim].
            value: [n, kv_heads, head_dim].
        """
        if layer not in self._shapes:
            self._shapes[layer] = key.new_empty(0, *key.shape[1:]), value.new_empty(0, *value.shape[1:])
        for tensor, new in zip(self.layer(layer), (key, value), strict=True):
            tensor.flatten(1, 2).index_copy_(1, places, new.transpose(0, 1))

    def add(self, length: int) -> Run:
        """Take a slot.

        Args:
            length: Of the run that begins in it.
        """
        run = Run(length, self, len(self.runs))
        self.reserve(len(self.runs) + 1)
        self.runs.append(run)
        return run

    def adopt(self, run: Run) -> None:
        """Take over a run from smaller slots.

        Args:
            run: With its keys and values.
        """
        slot = len(self.runs)
        self.reserve(slot + 1)
        for layer in self._shapes:
            for mine, other in zip(self.layer(layer), run.home.layer(layer), strict=True):
                mine[:, slot, : run.length] = other[:, run.slot, : run.length]
        run.home.remove(run)
        run.home, run.slot = self, slot
        self.runs.append(run)

    def remove(self, run: Run) -> None:
        """Free a slot; the last run moves into it. Without runs, memory is let go.

        Args:
            run: Whose slot it is.
        """
        last = self.runs.pop()
        if last is not run:
            for keys_values in self._layers.values():
                for tensor in keys_values:
                    tensor[:, run.slot, : last.length] = tensor[:, last.slot, : last.length]
            self.runs[run.slot], last.slot = last, run.slot
        if not self.runs:
            self._layers, self._num_slots = {}, 0

    def reserve(self, num_runs: int) -> None:
        """Have slots for so many runs.

        Args:
            num_runs: At least 1.
        """
        if num_runs <= self._num_slots:
            return
        wanted = max(num_runs, min(2 * self._num_slots, self._num_slots + MOST_SPARE_SLOTS))
        self._num_slots = -(-wanted // self._multiple) * self._multiple
        self.allocation = next(_allocations)
        for layer in self._shapes:
            before = self._layers.get(layer)
            self._layers[layer] = self._room(layer)
            for tensor, old in zip(self._layers[layer], before or (), strict=False):
                tensor[:, : old.shape[1]] = old

    def _room(self, layer: int) -> LayerKeysValues:
        (_, heads, width), (_, _, value_width) = (tensor.shape for tensor in self._shapes[layer])
        keys, values = self._shapes[layer]
        size = (heads, self._num_slots, self.capacity)
        return keys.new_zeros(*size, width), values.new_zeros(*size, value_width)


class RunStore:
    """Runs of any length, each in a slot less than twice as long, or of the smallest size."""

    def __init__(self, multiple: int = 1) -> None:
        """Begin without a run.

        Args:
            multiple: Of which the number of slots of a size is one.
        """
        self._shapes: dict[int, LayerKeysValues] = {}
        self._sizes: dict[int, Slots] = {}
        self._multiple = multiple

    def __iter__(self) -> Iterator[Slots]:
        """Slots that have runs, the smallest first."""
        return (self._sizes[capacity] for capacity in sorted(self._sizes) if self._sizes[capacity].runs)

    def add(self, length: int, room: int = 0) -> Run:
        """Begin a run.

        Args:
            length: Tokens that it has from the beginning.
            room: Tokens that it shall be able to get without moving.
        """
        return self._slots(length + room).add(length)

    def grow(self) -> bool:
        """Move runs that fill their slots into larger ones.

        Returns:
            Whether there were any.
        """
        moved = False
        for slots in list(self):
            full = [run for run in slots.runs if run.length == slots.capacity]
            if full:
                moved, larger = True, self._slots(2 * slots.capacity)
                larger.reserve(len(larger.runs) + len(full))
                for run in reversed(full):
                    larger.adopt(run)
        return moved

    def _slots(self, length: int) -> Slots:
        capacity = SMALLEST_SLOT
        while capacity < length:
            capacity *= 2
        if capacity not in self._sizes:
            self._sizes[capacity] = Slots(capacity, self._shapes, self._multiple)
        return self._sizes[capacity]
