"""Rows of columns as one sequence of bytes, wherever in memory they lie: what is sent, and where it is received."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int = NDArray[np.int64]
Bytes = NDArray[np.uint8]

TINY_RUN_BYTES = 64
"""Shorter runs are copied byte by byte in one call, longer ones by a call each."""


@dataclass(frozen=True)
class ByteColumn:
    """A column's memory, and where in it each row lies.

    Attributes:
        data: [num_bytes], all values.
        starts: [n] first byte of each row.
        sizes: [n] bytes of each row.
    """

    data: Bytes
    starts: Int
    sizes: Int

    @classmethod
    def of(cls, values: Tensor, lengths: Int) -> ByteColumn:
        """The memory of a tensor, itself, not a copy.

        Args:
            values: [total, ...], contiguous, in host memory.
            lengths: [n] values of each row, summing to `total`.
        """
        if not values.numel():
            return cls(np.zeros(0, dtype=np.uint8), np.zeros_like(lengths), np.zeros_like(lengths))
        sizes = lengths * (values.element_size() * values[0].numel())
        return cls(values.reshape(-1).view(torch.uint8).numpy(), np.cumsum(sizes) - sizes, sizes)


class ByteRuns:
    """A sequence of bytes made of runs of memory; what lies next to each other in memory is one run.

    Attributes:
        size: Bytes of the sequence.
    """

    def __init__(self, columns: Sequence[tuple[ByteColumn, Int]]) -> None:
        """String rows of columns together.

        Args:
            columns: Column after column, each with the rows that belong to the sequence, in order.
        """
        self._data = [column.data for column, _ in columns]
        owners, starts, sizes = [], [], []
        for index, (column, rows) in enumerate(columns):
            first, length = _merge(column.starts[rows], column.sizes[rows])
            owners.append(np.full(len(first), index, dtype=np.int64))
            starts.append(first)
            sizes.append(length)
        empty = [np.zeros(0, dtype=np.int64)]
        self._owners = np.concatenate(owners or empty)
        self._starts = np.concatenate(starts or empty)
        self._ends = np.cumsum(np.concatenate(sizes or empty))
        self.size = int(self._ends[-1]) if len(self._ends) else 0

    def view(self, begin: int, end: int) -> Bytes | None:
        """Bytes of the sequence where they lie, if they lie together.

        Args:
            begin: First byte.
            end: First byte after the part, above `begin`.
        """
        run = int(np.searchsorted(self._ends, begin, side="right"))
        if end > self._ends[run]:
            return None
        return self._part(run, begin, end)

    def read(self, begin: int, out: Bytes) -> None:
        """Copy bytes out of the sequence.

        Args:
            begin: First byte.
            out: Memory for as many bytes as are wanted.
        """
        for place, part, index in self._parts(begin, begin + len(out)):
            out[place] = part if index is None else part[index]

    def write(self, begin: int, content: Bytes) -> None:
        """Copy bytes into the sequence.

        Args:
            begin: First byte.
            content: What is to be there.
        """
        for place, part, index in self._parts(begin, begin + len(content)):
            part[... if index is None else index] = content[place]

    def _part(self, run: int, begin: int, end: int) -> Bytes:
        """The bytes from `begin` to `end` that lie in a run."""
        last = int(self._ends[run])
        first = int(self._ends[run - 1]) if run else 0
        offset = int(self._starts[run]) - first
        return self._data[int(self._owners[run])][max(begin, first) + offset : min(end, last) + offset]

    def _parts(self, begin: int, end: int) -> list[tuple[slice, Bytes, Int | None]]:
        """Where the bytes from `begin` to `end` lie: their place among them, memory, and an index into it or all."""
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right").tolist()
        parts: list[tuple[slice, Bytes, Int | None]] = []
        place = 0
        run = first
        while run <= last:
            stop = self._end_of_tiny(run, last)
            if stop > run + 1:
                index, data = self._index(run, stop, begin, end)
                parts.append((slice(place, place + len(index)), data, index))
                place += len(index)
            else:
                stop = run + 1
                part = self._part(run, begin, end)
                parts.append((slice(place, place + len(part)), part, None))
                place += len(part)
            run = stop
        return parts

    def _end_of_tiny(self, run: int, last: int) -> int:
        """Behind the runs of one column from here on that are tiny on average."""
        stop = int(np.searchsorted(self._owners, self._owners[run], side="right"))
        stop = min(stop, last + 1)
        begin = int(self._ends[run - 1]) if run else 0
        return stop if self._ends[stop - 1] - begin < TINY_RUN_BYTES * (stop - run) else run

    def _index(self, run: int, stop: int, begin: int, end: int) -> tuple[Int, Bytes]:
        """Index of every byte of several runs of a column, cut to what is between `begin` and `end`."""
        ends = self._ends[run:stop]
        begins = np.concatenate([[self._ends[run - 1] if run else 0], ends[:-1]])
        cut_begins, cut_ends = np.maximum(begins, begin), np.minimum(ends, end)
        sizes = cut_ends - cut_begins
        starts = self._starts[run:stop] + cut_begins - begins
        index = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return index, self._data[int(self._owners[run])]


def _merge(starts: Int, sizes: Int) -> tuple[Int, Int]:
    """Neighbours in memory as one run."""
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    if not len(starts):
        return starts, sizes
    is_first = np.concatenate([[True], starts[1:] != (starts + sizes)[:-1]])
    first = np.flatnonzero(is_first)
    return starts[first], np.add.reduceat(sizes, first)
