"""The key-value cache: segments of tokens in slots, and slots sorted by size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from torch import Tensor

SMALLEST_SLOT = 64
"""Tokens of the smallest slots; each size is twice the previous one."""
MOST_SPARE_SLOTS = 64
"""Most slots that are added beyond the needed ones. When slots of a size run out, their number at most doubles."""

LayerKeysValues = tuple[Tensor, Tensor]
_allocations = count(1)


@dataclass(eq=False)
class Segment:
    """Consecutive tokens of a sequence, whose keys and values lie in a slot of `home`.

    Its length includes the tokens that the current pass writes.
    """

    length: int
    home: Slots
    slot: int


class Slots:
    """Slots of one size; the first ones are in use, without a gap.

    Keys and values are [kv_heads, slots, tokens, head_dim], so that everything one head reads of a segment is
    contiguous. They are 0 where nothing was written: masked values are multiplied by 0, and 0 times NaN is NaN.
    """

    def __init__(self, capacity: int, shapes: dict[int, LayerKeysValues], multiple: int) -> None:
        """Describe slots, in multiples of a number; memory is allocated later, and `allocation` identifies it.

        `shapes` has empty tensors by layer, with the heads and the type of keys and values, once they are known.
        """
        self.capacity, self.segments = capacity, list[Segment]()
        self._shapes, self._multiple = shapes, multiple
        self._layers: dict[int, LayerKeysValues] = {}
        self._num_slots = 0
        self.allocation = 0

    def layer(self, layer: int) -> LayerKeysValues:
        """Return the keys and values of a layer."""
        if layer not in self._layers:  # the first pass makes the shapes known
            self._layers[layer] = self._room(layer)
        return self._layers[layer]

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of tokens, [n, kv_heads, head_dim].

        `places` are [n] int64: slot times capacity plus the place in the slot.
        """
        if layer not in self._shapes:
            self._shapes[layer] = key.new_empty(0, *key.shape[1:]), value.new_empty(0, *value.shape[1:])
        for tensor, new in zip(self.layer(layer), (key, value), strict=True):
            tensor.flatten(1, 2).index_copy_(1, places, new.transpose(0, 1))

    def add(self, length: int) -> Segment:
        """Start a segment of some length in a free slot."""
        segment = Segment(length, self, len(self.segments))
        self.reserve(len(self.segments) + 1)
        self.segments.append(segment)
        return segment

    def adopt(self, segment: Segment) -> None:
        """Move a segment here from smaller slots, with its keys and values."""
        slot = self.add(segment.length).slot
        for layer in self._shapes:
            for mine, other in zip(self.layer(layer), segment.home.layer(layer), strict=True):
                mine[:, slot, : segment.length] = other[:, segment.slot, : segment.length]
        segment.home.remove(segment)
        segment.home, segment.slot, self.segments[slot] = self, slot, segment

    def remove(self, segment: Segment) -> None:
        """Free the slot of a segment and move the last segment into it. Without segments, memory is released."""
        last = self.segments.pop()
        if last is not segment:
            for keys_values in self._layers.values():
                for tensor in keys_values:
                    tensor[:, segment.slot, : last.length] = tensor[:, last.slot, : last.length]
            self.segments[segment.slot], last.slot = last, segment.slot
        if not self.segments:
            self._layers, self._num_slots = {}, 0

    def reserve(self, num_segments: int) -> None:
        """Allocate slots for a number of segments."""
        if num_segments <= self._num_slots:
            return
        wanted = max(num_segments, min(2 * self._num_slots, self._num_slots + MOST_SPARE_SLOTS))
        self._num_slots = -(-wanted // self._multiple) * self._multiple
        self.allocation = next(_allocations)
        for layer in self._shapes:
            before, self._layers[layer] = self._layers.get(layer, ()), self._room(layer)
            for tensor, old in zip(self._layers[layer], before, strict=False):
                tensor[:, : old.shape[1]] = old

    def _room(self, layer: int) -> LayerKeysValues:
        keys, values = self._shapes[layer]
        size = (keys.shape[1], self._num_slots, self.capacity)
        return keys.new_zeros(*size, keys.shape[2]), values.new_zeros(*size, values.shape[2])


class SegmentStore:
    """Segments of any length, each in a slot that is less than twice as long, or of the smallest size."""

    def __init__(self, multiple: int = 1) -> None:
        """Start without segments. The number of slots of each size is a multiple of `multiple`."""
        self._shapes: dict[int, LayerKeysValues] = {}
        self._sizes: dict[int, Slots] = {}
        self._multiple = multiple

    def __iter__(self) -> Iterator[Slots]:
        """Iterate over slots that have segments, the smallest first."""
        return (self._sizes[capacity] for capacity in sorted(self._sizes) if self._sizes[capacity].segments)

    def add(self, length: int, room: int = 0) -> Segment:
        """Start a segment that can grow by `room` tokens before it has to move."""
        return self._slots(length + room).add(length)

    def grow(self) -> bool:
        """Move segments that fill their slots into larger ones; return whether there were any."""
        moved = False
        for slots in list(self):
            full = [segment for segment in slots.segments if segment.length == slots.capacity]
            if full:
                moved, larger = True, self._slots(2 * slots.capacity)
                larger.reserve(len(larger.segments) + len(full))
                for segment in reversed(full):
                    larger.adopt(segment)
        return moved

    def _slots(self, length: int) -> Slots:
        capacity = SMALLEST_SLOT
        while capacity < length:
            capacity *= 2
        if capacity not in self._sizes:
            self._sizes[capacity] = Slots(capacity, self._shapes, self._multiple)
        return self._sizes[capacity]
