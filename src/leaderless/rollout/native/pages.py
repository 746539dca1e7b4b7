"""The key-value cache of a device: pages of a fixed pool, and segments of tokens that have lists of them.

The pool is allocated once. A segment begins with pages of its own and takes another one when they are full, so that it
never moves. Siblings share the segment of their prompt, which they read by its length, and go on in segments of their
own. The first page belongs to nobody: rows that only fill up a shape write there.

    page         0   1   2   3   4   5       table
    nobody       x
    prompt           P   P                   1 2     both siblings read it
    sibling 1                a       a       3 5     it took page 5 when page 3 was full
    sibling 2                    b           4

    token t of a segment is at    table[slot, t // page_size] * page_size + t % page_size
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from leaderless.models.uploads import one_copy, placed
from leaderless.planner.memory.limits import PAGE_TOKENS
from leaderless.rollout.native.kv_cache import KeyValueStore, LayerKeysValues, Segment, Store

LEAST_WIDTH = 8
"""Least pages for which there is room in a list."""


class OutOfPagesError(RuntimeError):
    """There are not enough free pages."""


class PagePool(Store, KeyValueStore):
    """Pages with keys and values of all layers: [tokens, kv_heads, head_dim] each. The slot of a segment is its list.

    Attributes:
        table: [slots, width] int32, pages of each segment.
    """

    def __init__(self, num_pages: int, page_size: int = PAGE_TOKENS) -> None:
        """Describe pages of some tokens each; memory is allocated when the first pass makes the shapes known."""
        self.num_pages, self.page_size = num_pages, page_size
        self._layers: dict[int, LayerKeysValues] = {}
        self.clear()

    def clear(self) -> None:
        """Free all pages; memory stays allocated."""
        self.table = np.zeros((16, LEAST_WIDTH), dtype=np.int32)
        # Page 0 is not among them. Low numbers are at the end, where pages are taken.
        self._free = list(range(self.num_pages, 0, -1))
        self._slots = list(range(len(self.table) - 1, -1, -1))
        self._counts: dict[Segment, int] = {}
        self._kept: set[Segment] = set()

    def release(self) -> None:
        """Free all pages, and release the memory."""
        self.clear()
        self._layers = {}

    @property
    def is_allocated(self) -> bool:
        """Whether the first pass has allocated the memory."""
        return bool(self._layers)

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Number of pages of kept segments."""
        return sum(self._counts[segment] for segment in self._kept)

    @property
    def segments(self) -> Iterable[Segment]:
        """All segments."""
        return self._counts.keys()

    def pages_for(self, tokens: int) -> int:
        """Number of pages that hold some tokens."""
        return -(-tokens // self.page_size)

    @override
    def add(self, length: int, room: int = 0) -> Segment:
        """Start a segment in free pages.

        Raises:
            OutOfPagesError: There are not enough free pages.
        """
        if not self._slots:
            # Twice as large, so that growing is rare.
            count = len(self.table)
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
            self._slots = list(range(2 * count - 1, count - 1, -1))
        segment = Segment(length, self, self._slots.pop())
        self._counts[segment] = 0
        try:
            self.extend(segment, length + room)
        except OutOfPagesError:
            # Or its slot would be lost.
            self.remove(segment)
            raise
        return segment

    def extend(self, segment: Segment, tokens: int) -> None:
        """Give a segment pages for a number of tokens.

        Raises:
            OutOfPagesError: There are not enough; it has no more than before.
        """
        before, count = self._counts[segment], self.pages_for(tokens)
        # All or nothing: a caller that makes room and tries again finds the segment as it was.
        if count - before > len(self._free):
            raise OutOfPagesError(f"{count - before} pages are needed, and {len(self._free)} are free")
        while self.table.shape[1] < count:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        for place in range(before, count):
            self.table[segment.slot, place] = self._free.pop()
        self._counts[segment] = max(before, count)

    @override
    def remove(self, segment: Segment) -> None:
        """Free pages. Passes that were started may still write there; what is started later comes behind them."""
        self._cut(segment, 0)
        self._kept.discard(segment)
        self._slots.append(segment.slot)
        del self._counts[segment]

    @override
    def keep(self, segment: Segment) -> None:
        self._kept.add(segment)
        # Room for tokens that do not come is of use to others.
        self._cut(segment, segment.length)

    @override
    def can_cut(self, segment: Segment, length: int) -> bool:
        return True  # all layers keep all tokens

    @override
    def resume(self, segment: Segment, num_known: int, length: int) -> None:
        self._kept.discard(segment)
        # The next turn has other tokens behind those that both have in common.
        self._cut(segment, num_known)
        # With room for the first token of the response.
        self.extend(segment, length + 1)
        segment.length = length

    def _cut(self, segment: Segment, tokens: int) -> None:
        """Free the pages behind some tokens."""
        before, count = self._counts[segment], self.pages_for(tokens)
        if count < before:
            self._free += self.table[segment.slot, count:before].tolist()
            self._counts[segment] = count

    @override
    def join(self, first: Segment, second: Segment) -> Segment:
        # A copy: siblings may still read the prompt, and its last page is rarely full.
        joined = self.add(first.length + second.length, room=1)
        source = torch.cat([self.places(one, 0, one.length) for one in (first, second)])
        target = self.places(joined, 0, joined.length)
        tensors = [tensor for keys_values in self._layers.values() for tensor in keys_values]
        if tensors:
            with one_copy(tensors[0].device):
                source, target = (placed(places, tensors[0].device) for places in (source, target))
        for tensor in tensors:
            tensor.index_copy_(0, target, tensor.index_select(0, source))
        return joined

    def slots_at(self, segments: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Places in a layer's keys and values of the token at some place of each segment, which are given by slot."""
        pages = self.table[segments, places // self.page_size].astype(np.int64)
        found: npt.NDArray[np.int64] = pages * self.page_size + places % self.page_size
        return found

    @override
    def places(self, segment: Segment, begin: int, count: int) -> Tensor:
        return torch.from_numpy(self.slots_at(np.full(count, segment.slot), np.arange(begin, begin + count)))

    @override
    def reader(
        self, segments: Sequence[Segment], longest: int, device: torch.device
    ) -> Callable[[int], LayerKeysValues]:
        """Make a reader of pages, which repeats the last token behind the end of a segment."""
        token = torch.arange(longest)
        each = [self.places(one, 0, one.length)[token.clamp(max=one.length - 1)] for one in segments]
        places = placed(torch.stack(each), device)

        def read(tensor: Tensor) -> Tensor:
            taken = tensor.index_select(0, places.flatten()).view(*places.shape, *tensor.shape[1:])
            return taken.permute(2, 0, 1, 3)

        def read_layer(layer: int) -> LayerKeysValues:
            keys, values = self.layer(layer)
            return read(keys), read(values)

        return read_layer

    @override
    def layer(self, layer: int) -> LayerKeysValues:
        return self._layers[layer]

    @override
    def write(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        for tensor, new in zip(self.room(layer, key, value), (key, value), strict=True):
            tensor.index_copy_(0, places, new)

    def room(self, layer: int, key: Tensor, value: Tensor) -> LayerKeysValues:
        """Return the keys and values of a layer, allocated for the first ones, [n, kv_heads, head_dim] each."""
        if layer not in self._layers:
            # With page 0, which is not counted.
            tokens = (self.num_pages + 1) * self.page_size
            self._layers[layer] = key.new_zeros(tokens, *key.shape[1:]), value.new_zeros(tokens, *value.shape[1:])
        return self._layers[layer]
