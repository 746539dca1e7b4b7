"""The key-value cache: segments of tokens in slots, and slots sorted by size.

Layers whose tokens attend to the last ones alone keep these: a token takes the place of one that no later token sees.

Segments of responses that are being decoded are active. Those of conversations that wait for their next turn are kept:
they stay in slots behind the active ones, where no pass reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

import torch
from torch import Tensor

from leaderless.models.attention.recurrence import LayerStates, Mixer
from leaderless.models.uploads import placed
from leaderless.planner.memory.attention_kinds import AttentionKind
from leaderless.planner.memory.limits import MOST_SPARE_SLOTS, SMALLEST_SLOT

LayerKeysValues = tuple[Tensor, Tensor]
StateBatches = dict[int, tuple[LayerStates, list[LayerStates]]]
"""States of the rows of a pass by layer, together and of each row, which are parts of the former."""


def _capacity(length: int) -> int:
    """Tokens of the smallest slot that has room for some."""
    capacity = SMALLEST_SLOT
    while capacity < length:
        capacity *= 2
    return capacity


def tokens_at(places: Tensor, ends: Tensor, kept: int) -> Tensor:
    """The tokens at places of segments that end somewhere, where `kept` are kept; below 0 where none was written."""
    return ends - 1 - (ends - 1 - places) % kept


@dataclass(eq=False)
class Segment:
    """Consecutive tokens of a sequence, whose keys and values lie in a slot of `home`.

    Its length includes the tokens that the current pass writes. Layers that read by recurrence have states behind its
    last token, by the number of the layer.
    """

    length: int
    home: KeyValueStore
    slot: int
    states: dict[int, LayerStates] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptPart:
    """The `count` tokens of a text that one pass reads, after `begin` tokens that were read earlier.

    Those of a response come after all of a prompt that it shares, which has a segment to itself. Of a text that begins
    with this part, the first `num_both` tokens attend to one another in both directions.
    """

    segment: Segment
    begin: int
    count: int
    prompt: Segment | None = None
    num_both: int = 0

    @property
    def position(self) -> int:
        """Position of the first of the tokens; 0 if the part begins a text."""
        return self.begin + (self.prompt.length if self.prompt else 0)


class KeyValueStore(Protocol):
    """Where the keys and values of segments lie."""

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of tokens, [n, kv_heads, head_dim], at [n] int64 places."""

    def places(self, segment: Segment, begin: int, count: int) -> Tensor:
        """Find the places of some tokens of a segment, for `write`."""

    def reader(
        self, segments: Sequence[Segment], longest: int, device: torch.device
    ) -> Callable[[int], LayerKeysValues]:
        """Make a function that reads what segments have in a layer, [kv_heads, segments, longest, head_dim] each."""

    def layer(self, layer: int) -> LayerKeysValues:
        """Return the keys and values of a layer."""

    def keep(self, segment: Segment) -> None:
        """Keep an active segment, which no pass reads."""

    def can_cut(self, segment: Segment, length: int) -> bool:
        """Whether a segment has all that the token behind its first ones depends on."""

    def remove(self, segment: Segment) -> None:
        """Free the memory of a segment."""


class Store(Protocol):
    """Makes segments."""

    def add(self, length: int, room: int = 0) -> Segment:
        """Start a segment that can grow by `room` tokens at once."""

    def join(self, first: Segment, second: Segment) -> Segment:
        """Copy two segments into an active one that can grow."""

    def resume(self, segment: Segment, num_known: int, length: int) -> None:
        """Make a kept segment active, with its first `num_known` tokens and room for one more than `length` tokens."""


class Slots:
    """Slots of one size. The first ones have the active segments, the next ones those that are kept, without a gap.

    Keys and values are [kv_heads, slots, tokens, head_dim], so that everything one head reads of a segment is
    contiguous. They are 0 where nothing was written: masked values are multiplied by 0, and 0 times NaN is NaN. In
    layers that keep n tokens, a segment's token t is at place t modulo n.
    """

    def __init__(self, capacity: int, shapes: dict[int, LayerKeysValues], kinds: Mapping[int, AttentionKind]) -> None:
        """Describe slots; memory is allocated later.

        `shapes` has empty tensors by layer, with the heads and the type of keys and values, once they are known, and
        `kinds` the layers that do not need all tokens.
        """
        self.capacity, self._segments, self._kinds = capacity, list[Segment](), kinds
        self._num_active = 0
        self._shapes = shapes
        self._layers: dict[int, LayerKeysValues] = {}
        self._num_slots = 0

    @property
    def segments(self) -> Sequence[Segment]:
        """The active segments, in the order of their slots."""
        return self._segments[: self._num_active]

    def num_kept(self, layer: int) -> int:
        """Tokens for which a slot has room in a layer."""
        kind = self._kinds.get(layer)
        most = None if kind is None else kind.window or kind.chunk
        return self.capacity if most is None else min(self.capacity, _capacity(most))

    def can_cut(self, segment: Segment, length: int) -> bool:
        """Whether a segment has all that the token behind its first ones depends on; states are behind its last one."""
        if segment.states and length < segment.length:
            return False
        return all(
            segment.length - self.num_kept(layer) <= kind.first_key(length) for layer, kind in self._kinds.items()
        )

    def layer(self, layer: int) -> LayerKeysValues:
        """Return the keys and values of a layer."""
        if layer not in self._layers:  # the first pass makes the shapes known
            self._layers[layer] = self._room(layer)
        return self._layers[layer]

    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of tokens, [n, kv_heads, head_dim].

        `places` are [n] int64: slot times capacity plus the token's number in the segment. None of the tokens may take
        the place of another.
        """
        if layer not in self._shapes:
            self._shapes[layer] = key.new_empty(0, *key.shape[1:]), value.new_empty(0, *value.shape[1:])
        if (kept := self.num_kept(layer)) < self.capacity:
            places = places // self.capacity * kept + places % kept
        for tensor, new in zip(self.layer(layer), (key, value), strict=True):
            tensor.flatten(1, 2).index_copy_(1, places, new.transpose(0, 1))

    def places(self, segment: Segment, begin: int, count: int) -> Tensor:
        """Compute the slot times the capacity plus the number of each token."""
        return segment.slot * self.capacity + torch.arange(begin, begin + count)

    def reader(
        self, segments: Sequence[Segment], longest: int, device: torch.device
    ) -> Callable[[int], LayerKeysValues]:
        """Make a reader of slots, which copies nothing if there is only one segment."""
        slots = [segment.slot for segment in segments]
        indices = placed(torch.tensor(slots), device)

        def read(tensor: Tensor) -> Tensor:
            if len(slots) == 1:
                return tensor[:, slots[0] : slots[0] + 1, :longest]
            return tensor[:, :, :longest].index_select(1, indices)

        def read_layer(layer: int) -> LayerKeysValues:
            keys, values = self.layer(layer)
            return read(keys), read(values)

        return read_layer

    def add(self, length: int) -> Segment:
        """Start an active segment of some length."""
        self.reserve(1)
        segment = Segment(length, self, len(self._segments))
        self._segments.append(segment)
        self._fill(segment, self._segments[self._num_active])
        self._num_active += 1
        return segment

    def activate(self, segment: Segment) -> None:
        """Make a kept segment active."""
        self._exchange(segment, self._segments[self._num_active])
        self._num_active += 1

    def keep(self, segment: Segment) -> None:
        """Keep an active segment, with states apart from those of the responses that were decoded with it."""
        segment.states = {layer: states.copy() for layer, states in segment.states.items()}
        self._num_active -= 1
        self._exchange(segment, self._segments[self._num_active])

    def _exchange(self, one: Segment, other: Segment) -> None:
        if one is other:
            return
        longest = max(one.length, other.length)
        for keys_values in self._layers.values():
            for tensor in keys_values:
                before = tensor[:, one.slot, :longest].clone()
                tensor[:, one.slot, :longest] = tensor[:, other.slot, :longest]
                tensor[:, other.slot, :longest] = before
        self._rename(one, other)

    def adopt(self, segment: Segment) -> None:
        """Move a segment here from smaller slots, with its keys and values, and make it active."""
        here = self.add(segment.length)
        self.copy(segment, here, 0)
        segment.home.remove(segment)
        segment.home, segment.slot, self._segments[here.slot] = self, here.slot, segment

    def copy(self, source: Segment, segment: Segment, begin: int) -> None:
        """Copy the keys and values of a segment into one that is here, from the token `begin` on."""
        for layer in self._shapes:
            for mine, other in zip(self.layer(layer), source.home.layer(layer), strict=True):
                if mine.shape[2] == self.capacity:
                    mine[:, segment.slot, begin : begin + source.length] = other[:, source.slot, : source.length]
                    continue
                last = min(source.length, mine.shape[2], other.shape[2])
                tokens = torch.arange(source.length - last, source.length, device=mine.device)
                mine[:, segment.slot, (begin + tokens) % mine.shape[2]] = other[:, source.slot, tokens % other.shape[2]]

    def remove(self, segment: Segment) -> None:
        """Free the slot of a segment: the last one moves into it. Without segments, memory is released."""
        if segment.slot < self._num_active:
            self._num_active -= 1
            self._fill(segment, self._segments[self._num_active])
        self._fill(segment, self._segments[-1])
        self._segments.pop()
        if not self._segments:
            self._layers, self._num_slots = {}, 0

    def _fill(self, empty: Segment, other: Segment) -> None:
        """Move a segment into the slot of one without keys and values, which gets the other's slot."""
        if other is empty:
            return
        for keys_values in self._layers.values():
            for tensor in keys_values:
                tensor[:, empty.slot, : other.length] = tensor[:, other.slot, : other.length]
        self._rename(empty, other)

    def _rename(self, one: Segment, other: Segment) -> None:
        one.slot, other.slot = other.slot, one.slot
        self._segments[one.slot], self._segments[other.slot] = one, other

    def reserve(self, num_more: int) -> None:
        """Allocate slots for a number of further segments."""
        num_segments = len(self._segments) + num_more
        if num_segments <= self._num_slots:
            return
        self._num_slots = max(num_segments, min(2 * self._num_slots, self._num_slots + MOST_SPARE_SLOTS))
        for layer in self._shapes:
            before, self._layers[layer] = self._layers.get(layer, ()), self._room(layer)
            for tensor, old in zip(self._layers[layer], before, strict=False):
                tensor[:, : old.shape[1]] = old

    def _room(self, layer: int) -> LayerKeysValues:
        keys, values = self._shapes[layer]
        size = (keys.shape[1], self._num_slots, self.num_kept(layer))
        return keys.new_zeros(*size, keys.shape[2]), values.new_zeros(*size, values.shape[2])


class SegmentStore:
    """Segments of any length, each in a slot that is less than twice as long, or of the smallest size."""

    def __init__(self, shapes: dict[int, LayerKeysValues], kinds: Sequence[AttentionKind] = ()) -> None:
        """Start without segments; stores share shapes, so that segments can be copied between them.

        Without kinds of attention, all layers keep all tokens.
        """
        self._shapes = shapes
        self._kinds = {layer: kind for layer, kind in enumerate(kinds) if kind.has_attention and not kind.sees_all}
        self._sizes: dict[int, Slots] = {}

    def __iter__(self) -> Iterator[Slots]:
        """Iterate over slots that have active segments, the smallest first."""
        return (self._sizes[capacity] for capacity in sorted(self._sizes) if self._sizes[capacity].segments)

    def add(self, length: int, room: int = 0) -> Segment:
        """Start a segment that can grow by `room` tokens before it has to move."""
        return self._slots(length + room).add(length)

    def join(self, first: Segment, second: Segment) -> Segment:
        """Copy two segments into an active one that can grow."""
        slots = self._slots(first.length + second.length + 1)
        joined = slots.add(first.length + second.length)
        slots.copy(first, joined, 0)
        slots.copy(second, joined, first.length)
        joined.states = second.states or first.states  # a response of one token has none of its own
        return joined

    def resume(self, segment: Segment, num_known: int, length: int) -> None:
        """Make a kept segment active, with its first `num_known` tokens and room for one more than `length` tokens."""
        assert isinstance(segment.home, Slots)
        segment.length = num_known
        slots = self._slots(length + 1)
        if slots.capacity > segment.home.capacity:
            slots.adopt(segment)
        else:
            segment.home.activate(segment)
        segment.length = length

    def recur(
        self, batches: StateBatches, layer: int, mixer: Mixer, hidden: Tensor, prompts: Sequence[Segment | None]
    ) -> Tensor:
        """Read a token of each active segment, [n, hidden_size], by recurrence; the first one after its prompt."""
        segments = [segment for slots in self for segment in slots.segments]
        batch, parts = batches.get(layer, (LayerStates(), []))
        own = [
            segment.states[layer] if prompt is None or layer in segment.states else prompt.states[layer]
            for segment, prompt in zip(segments, prompts, strict=True)
        ]
        if len(own) != len(parts) or any(one is not part for one, part in zip(own, parts, strict=True)):
            # States stay next to one another until responses come, go or move, or are read again.
            batch = LayerStates.joined(own)
            parts = [batch.changed(itemgetter(slice(row, row + 1))) for row in range(len(segments))]
            for segment, part in zip(segments, parts, strict=True):
                segment.states[layer] = part
            batches[layer] = batch, parts
        return batch.advanced(mixer, hidden.unsqueeze(1)).squeeze(1)

    def grow(self) -> bool:
        """Move active segments that fill their slots into larger ones; return whether there were any."""
        moved = False
        for slots in list(self):
            full = [segment for segment in slots.segments if segment.length == slots.capacity]
            if full:
                moved, larger = True, self._slots(2 * slots.capacity)
                larger.reserve(len(full))
                for segment in reversed(full):
                    larger.adopt(segment)
        return moved

    def _slots(self, length: int) -> Slots:
        capacity = _capacity(length)
        if capacity not in self._sizes:
            self._sizes[capacity] = Slots(capacity, self._shapes, self._kinds)
        return self._sizes[capacity]
