"""Plan of a decoding pass over pages: which rows attend to which pages, as numbers that are copied in one go.

The work is cut into items. An item is some rows and some consecutive tokens of what they attend to: a row alone and its
own tokens, or siblings and tokens of the prompt that they share. Every item is computed by itself, and what belongs to
a row is merged. Long sequences are cut into several items, so that a device with few rows is busy, too; there are at
most `SPARE_ITEMS` more items than rows, whatever the lengths. So the shapes of a pass depend on the number of its rows
alone, which is rounded up to one of a few, and a recorded pass can be used again.

    row 0     own tokens |   0   |       tokens of its prompt |   s   |  s+2  |
    row 1     own tokens |   1   |                            |  s+1  |  s+3  |
    row 2     own tokens |   2   |   3   |       no shared prompt

    runs      row 0: first 0, 1 result, and first s, 2 results at distance 2

Each box is the number of a result, and `s` the first one of shared prompts. Boxes of rows 0 and 1 below each other are
one item, which reads its part of the prompt once for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leaderless.planner.memory.limits import SPARE_ITEMS
from leaderless.rollout.native.kv_cache import Segment
from leaderless.rollout.native.pages import PagePool

LEAST_ITEM_TOKENS = 256
"""Tokens below which it is not worth it to cut a sequence."""
TILE_ROWS = 8
"""Most siblings that attend to their prompt together, so that its keys and values are read once for all of them."""
ITEM_NUMBERS = 5
"""Numbers of an item: first entry of the list of pages, tokens, first entry of the list of rows, rows, first result."""
ALIGNMENT = 16
"""Divisor of the place of each kind of numbers, in bytes."""

Ints = npt.NDArray[np.int64]


@dataclass
class WorkItems:
    """Items of one kind.

    Attributes:
        items: [n, ITEM_NUMBERS] int32; items that are not needed have no tokens.
        rows: Rows of the pass in the order of the items, int32.
        most_rows: Most rows of an item.
        longest: Most tokens of an item of the current pass.
    """

    items: Tensor
    rows: Tensor
    most_rows: int
    longest: int = 0


@dataclass
class PagedPlan:
    """A pass with one new token for each row, on the device. Rows behind the real ones write into the first page.

    Attributes:
        noise: [n] float64, by which tokens are drawn.
        positions: [n] int64.
        seats: [n] int64, places where the last tokens of the responses are, and where the next ones are written.
        places: [n] int64, where keys and values of the new tokens are written.
        own: Items of own tokens.
        shared: Items of shared prompts.
        runs: [n, 2, 3] int32: of each row and kind of item the first result, the number of results and their distance.
        pages: int32, list of pages.
        page_size: Tokens of a page.
        results: Results of items, shared by all plans: float32 outputs and normalizers.
    """

    noise: Tensor
    positions: Tensor
    seats: Tensor
    places: Tensor
    own: WorkItems
    shared: WorkItems
    runs: Tensor
    pages: Tensor
    page_size: int
    results: Results

    def room(self, num_heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Memory for results of items, [n, num_heads, width] and [n, num_heads] float32."""
        return self.results.room(num_results(len(self.places)), num_heads, width)


class Results:
    """Memory for the results of items, which every layer of every pass uses again."""

    def __init__(self, most_rows: int, device: torch.device) -> None:
        self._most, self._device = num_results(most_rows), device
        self._rooms: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def room(self, count: int, num_heads: int, width: int) -> tuple[Tensor, Tensor]:
        """Make memory for outputs and normalizers, the same for every layer and pass."""
        if (num_heads, width) not in self._rooms:
            shape = self._most, num_heads, width
            outputs, normalizers = (torch.empty(size, device=self._device) for size in (shape, shape[:2]))
            self._rooms[num_heads, width] = outputs, normalizers
        outputs, normalizers = self._rooms[num_heads, width]
        return outputs[:count], normalizers[:count]


def num_results(rows: int) -> int:
    """Results of a pass over some rows: one for each item of own tokens, and for each row of each shared item."""
    return (rows + SPARE_ITEMS) + (2 * rows + SPARE_ITEMS)


class Fields(NamedTuple):
    """Numbers of a pass in one piece of memory, as tensors or as arrays."""

    noise: Tensor
    positions: Tensor
    seats: Tensor
    places: Tensor
    own: Tensor
    shared: Tensor
    rows: Tensor
    runs: Tensor
    pages: Tensor


def fields_of(data: Tensor, rows: int) -> Fields:
    """Divide [bytes] uint8 into the numbers of a pass over some rows; what is left is for pages."""
    wide, narrow = torch.int64, torch.int32
    begin, num_items = 0, rows + SPARE_ITEMS

    def take(dtype: torch.dtype, *shape: int) -> Tensor:
        nonlocal begin
        end = begin + dtype.itemsize * math.prod(shape)
        taken = data[begin:end].view(dtype).view(shape)
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        return taken

    # Pages come last: how many there are differs from pass to pass, and only what is used is copied.
    return Fields(
        noise=take(torch.float64, rows),
        positions=take(wide, rows),
        seats=take(wide, rows),
        places=take(wide, rows),
        own=take(narrow, num_items, ITEM_NUMBERS),
        shared=take(narrow, num_items, ITEM_NUMBERS),
        rows=take(narrow, rows),
        runs=take(narrow, rows, 2, 3),
        pages=data[begin : len(data) // 4 * 4].view(narrow),
    )


def num_bytes(rows: int, pages: int) -> int:
    """Bytes for the numbers of a pass over some rows and pages."""
    num_items = rows + SPARE_ITEMS
    # The last term is room for the gaps: each of the nine fields begins at a multiple of the alignment.
    return 4 * 8 * rows + 4 * (2 * num_items * ITEM_NUMBERS + 7 * rows + pages) + 9 * ALIGNMENT


class _Texts(NamedTuple):
    """Texts to which rows attend: tokens and rows of each, where its rows begin, and where its pages begin."""

    tokens: Ints
    first_rows: Ints
    num_rows: Ints
    tables: Ints


class Arrangement:
    """The rows of passes until responses come or go: who attends to which prompt together with whom."""

    def __init__(self, own_slots: Ints, prompt_slots: Ints, prompt_tokens: Ints) -> None:
        """Arrange rows, each with a segment of its own and a prompt that it shares, or -1 for none.

        Args:
            own_slots: [n] slots of the rows' own segments.
            prompt_slots: [n] slots of the prompts' segments.
            prompt_tokens: [n] tokens of the prompts.
        """
        self.own_slots = own_slots
        readers = np.flatnonzero(prompt_slots >= 0)
        _, first, prompt = np.unique(prompt_slots[readers], return_index=True, return_inverse=True)
        prompt = first.argsort().argsort()[prompt]  # of each reader; prompts are in the order of their first readers
        self.rows = readers[prompt.argsort(kind="stable")]
        first = readers[np.sort(first)]
        self.prompt_slots = prompt_slots[first]
        num_readers = np.bincount(prompt, minlength=len(first))
        num_tiles = -(-num_readers // TILE_ROWS)
        self.prompt_of_tile, number = _counted(num_tiles)
        self.tile_tokens = prompt_tokens[first][self.prompt_of_tile]
        self.tile_counts = np.minimum(num_readers[self.prompt_of_tile] - number * TILE_ROWS, TILE_ROWS)
        self.tile_begins = self.tile_counts.cumsum() - self.tile_counts
        self.tile_of, self.member_of = _counted(self.tile_counts)  # of each entry of `rows`

    @classmethod
    def of(cls, owns: Sequence[Segment], prompts: Sequence[Segment | None]) -> Arrangement:
        """Arrange rows by their segments."""
        shared = np.array([(-1, 0) if prompt is None else (prompt.slot, prompt.length) for prompt in prompts])
        return cls(np.array([segment.slot for segment in owns]), shared[:, 0], shared[:, 1])

    def num_listed(self, lengths: Ints, page_size: int) -> int:
        """Count the pages in the list of a pass in which rows have some tokens of their own."""
        own, shared = self._widths(lengths, page_size)
        return len(lengths) * own + len(self.prompt_slots) * shared

    def _widths(self, lengths: Ints, page_size: int) -> tuple[int, int]:
        """Most pages of a row's own segment, and of a prompt."""
        return -(-int(lengths.max()) // page_size), -(-int(self.tile_tokens.max(initial=0)) // page_size)

    def write(self, host: Fields, lengths: Ints, pages: PagePool) -> tuple[int, int, int]:
        """Write the items of a pass.

        Args:
            host: Numbers of the pass, in host memory.
            lengths: [n] tokens of each row's own segment, with the new one.
            pages: Pages of segments.

        Returns:
            Most tokens of an item of own tokens and of one of a shared prompt, and the number of pages in the list.
        """
        page_size, rows, num_prompts = pages.page_size, len(lengths), len(self.prompt_slots)
        # All lists of a kind are as wide as the longest, so that the pages of a row begin at its number times the
        # width.
        width, prompt_width = self._widths(lengths, page_size)
        listed, begin = host.pages.numpy(), rows * width
        end = begin + num_prompts * prompt_width
        listed[:begin].reshape(rows, width)[:] = pages.table[self.own_slots, :width]
        listed[begin:end].reshape(num_prompts, prompt_width)[:] = pages.table[self.prompt_slots, :prompt_width]
        runs = host.runs.numpy()
        # Rows behind the real ones have no results, and their outputs are zeros.
        runs[:] = 0
        each = np.arange(rows)
        own = _Texts(lengths, each, np.ones_like(each), each * width)
        first, parts, longest = _write_items(host.own.numpy(), own, SPARE_ITEMS, 0, page_size)
        runs[:rows, 0, 0], runs[:rows, 0, 1], runs[:rows, 0, 2] = first, parts, 1
        host.rows.numpy()[: len(self.rows)] = self.rows
        # All rows of a tile read the same list of pages, that of their prompt.
        tables = begin + self.prompt_of_tile * prompt_width
        tiles = _Texts(self.tile_tokens, self.tile_begins, self.tile_counts, tables)
        spare = len(host.places) + SPARE_ITEMS
        first, parts, longest_shared = _write_items(host.shared.numpy(), tiles, spare, len(host.own), page_size)
        # Results of an item lie next to each other, one a row, and those of the next item of the tile behind them: the
        # distance is the number of rows of the tile.
        runs[self.rows, 1, 0] = first[self.tile_of] + self.member_of
        runs[self.rows, 1, 1], runs[self.rows, 1, 2] = parts[self.tile_of], self.tile_counts[self.tile_of]
        return longest, longest_shared, end


def _counted(counts: Ints) -> tuple[Ints, Ints]:
    """Kind of each thing, and its number within its kind, from the number of things of each kind."""
    kinds = np.repeat(np.arange(len(counts)), counts)
    return kinds, np.arange(len(kinds)) - (counts.cumsum() - counts)[kinds]


def _write_items(
    items: npt.NDArray[np.int32], texts: _Texts, spare_results: int, first_result: int, page_size: int
) -> tuple[Ints, Ints, int]:
    """Cut texts into items that are small enough for all of them and their results to have room.

    Returns:
        First result and number of items of each text, and most tokens of an item.
    """
    num_pages = -(-texts.tokens // page_size)
    # Rounding up adds less than one part to each text. So there are at most SPARE_ITEMS more items than texts, and at
    # most `spare_results` more results than rows: what `num_results` and `Fields` have room for.
    size = max(
        -(-LEAST_ITEM_TOKENS // page_size),
        -(-int(num_pages.sum()) // SPARE_ITEMS),
        -(-int((num_pages * texts.num_rows).sum()) // spare_results),
    )
    parts = -(-num_pages // size)
    text, part = _counted(parts)
    rows = texts.num_rows[text]
    results = first_result + rows.cumsum() - rows
    own = items[: len(text)]
    own[:, 0] = texts.tables[text] + part * size
    own[:, 1] = np.minimum(texts.tokens[text] - part * size * page_size, size * page_size)
    own[:, 2], own[:, 3], own[:, 4] = texts.first_rows[text], rows, results
    # The shape of the pass does not change: items that are not needed have no tokens.
    items[len(text) :, 1] = 0
    return results[part == 0], parts, int(own[:, 1].max(initial=0))
