"""The memory of columns as sequences of bytes, on the rank that sends rows and on the rank that receives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.base.values import Json
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.buffer.wire import DTYPES, ColumnSchema, Schema, to_json
from leaderless.planner.assign.balance import Int

Bytes = NDArray[np.uint8]

COPY_BYTES = 1 << 22
"""Rows that stay on a rank are copied in pieces of this size."""


@dataclass(frozen=True)
class ByteColumn:
    """A column's memory, and where each row lies in it.

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
        """The memory itself, not a copy, of contiguous values [total, ...]; each row has `lengths` of them."""
        if not values.numel():
            return cls(np.zeros(0, dtype=np.uint8), np.zeros_like(lengths), np.zeros_like(lengths))
        sizes = lengths * (values.element_size() * values[0].numel())
        return cls(values.reshape(-1).view(torch.uint8).numpy(), np.cumsum(sizes) - sizes, sizes)


class ByteRuns:
    """A sequence of bytes made of runs of memory; neighbors in memory form one run.

    Attributes:
        size: Bytes of the sequence.
    """

    def __init__(self, columns: Sequence[tuple[ByteColumn, Int]]) -> None:
        """Join rows, column after column; each column comes with its rows in the sequence, in order."""
        self._data = [column.data for column, _ in columns]
        runs = [_merge(column.starts[rows], column.sizes[rows]) for column, rows in columns]
        empty = np.zeros(0, dtype=np.int64)
        self._owners = np.repeat(np.arange(len(runs)), [len(starts) for starts, _ in runs])
        self._starts = np.concatenate([empty, *(starts for starts, _ in runs)])
        self._sizes = np.concatenate([empty, *(sizes for _, sizes in runs)])
        self._ends = np.cumsum(self._sizes)
        self.size = int(self._sizes.sum())

    def parts(self, begin: int, end: int) -> list[Bytes]:
        """The memory of the bytes from `begin` to `end`, run by run."""
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right")
        some = slice(first, last + 1)
        offsets = self._starts[some] - (self._ends[some] - self._sizes[some])
        begins = np.maximum(self._ends[some] - self._sizes[some], begin) + offsets
        ends = np.minimum(self._ends[some], end) + offsets
        places = zip(self._owners[some].tolist(), begins.tolist(), ends.tolist(), strict=True)
        return [self._data[owner][start:stop] for owner, start, stop in places]

    def read(self, begin: int, end: int) -> Bytes:
        """The bytes from `begin` to `end`: the memory itself if they are contiguous, or else a copy."""
        parts = self.parts(begin, end)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def write(parts: Sequence[Bytes], content: Bytes) -> None:
    """Copy bytes into parts of memory of the same total size."""
    begin = 0
    for part in parts:
        part[:] = content[begin : begin + len(part)]
        begin += len(part)


def copy(source: ByteRuns, target: ByteRuns) -> None:
    """Copy a sequence of bytes into another of the same size, with little extra memory."""
    for begin in range(0, source.size, COPY_BYTES):
        end = min(begin + COPY_BYTES, source.size)
        write(target.parts(begin, end), source.read(begin, end))


def _merge(starts: Int, sizes: Int) -> tuple[Int, Int]:
    """Neighbors in memory as one run."""
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    if not len(starts):
        return starts, sizes
    first = np.flatnonzero(np.concatenate([[True], starts[1:] != (starts + sizes)[:-1]]))
    return starts[first], np.add.reduceat(sizes, first)


def ragged_keys(schema: Schema) -> tuple[str, ...]:
    """Keys of a schema's ragged lengths: the axes of jagged columns, and the text of each object column."""
    return tuple(dict.fromkeys(ragged_key(column) for column in schema if column.kind != "dense"))


def ragged_key(column: ColumnSchema) -> str:
    """The key of a ragged column's lengths."""
    return f"axis {column.axis}" if column.kind == "jagged" else f"text {column.name}"


class _Texts:
    """The texts of an object column, each made and held once, in the order of the requests."""

    def __init__(self, num_rows: int) -> None:
        self.data = bytearray()
        self.starts = np.full(num_rows, -1, dtype=np.int64)
        self.sizes = np.zeros(num_rows, dtype=np.int64)


class HeldRows:
    """A rank's rows, ascending, as bytes to send. Prompts are separate rows; texts are made on demand."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._ids = batch.ids.numpy()
        self._texts: dict[str, _Texts] = {}
        self._columns: dict[str, ByteColumn] = {}

    def places(self, ids: Int) -> Int:
        """[m] places of the rows with these ids; -1 for rows that are not here."""
        if not len(self._ids):
            return np.full(len(ids), -1, dtype=np.int64)
        found = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        places: Int = np.where(self._ids[found] == ids, found, -1)
        return places

    def lengths(self, key: str, places: Int) -> Int:
        """[m] number of values, or bytes of text, in rows at some places, along one of the schema's `ragged_keys`."""
        kind, name = key.split(" ", 1)
        if kind == "axis":
            jagged = (column for column in self.batch.columns.values() if isinstance(column, Jagged))
            return next(column.lengths.numpy()[places] for column in jagged if column.axis == name)
        self._columns.pop(name, None)  # it would keep its texts from growing
        values = self.batch.objects(name)
        texts = self._texts.setdefault(name, _Texts(len(values)))
        for place in places[texts.starts[places] < 0].tolist():
            text = to_json(name, values[place])
            texts.starts[place], texts.sizes[place] = len(texts.data), len(text)
            texts.data.extend(text)
        return texts.sizes[places]

    def column(self, name: str) -> ByteColumn:
        """The memory of a column; for objects, the memory of the texts whose lengths have been requested."""
        if name not in self._columns:
            column = self.batch.columns[name]
            if isinstance(column, tuple):
                texts = self._texts.get(name) or _Texts(len(column))
                found = ByteColumn(np.frombuffer(texts.data, dtype=np.uint8), texts.starts, texts.sizes)
            elif isinstance(column, Jagged):
                found = ByteColumn.of(column.values.contiguous(), column.lengths.numpy())
            else:
                found = ByteColumn.of(column.contiguous(), np.ones(len(column), dtype=np.int64))
            self._columns[name] = found
        return self._columns[name]


class ArrivingRows:
    """Rows that a rank receives: their memory, allocated once and filled in place."""

    def __init__(self, schema: Schema, ids: Int, lengths: Mapping[str, Int]) -> None:
        """Allocate the columns; `lengths` of objects that are already here are 0."""
        self.schema, self.ids, self._lengths = schema, ids, lengths
        self._objects: dict[str, dict[int, Json]] = {column.name: {} for column in schema if column.kind == "object"}
        self._values: dict[str, Tensor] = {}
        self._columns: dict[str, ByteColumn] = {}
        for column in schema:
            sizes = np.ones_like(ids) if column.kind == "dense" else lengths[ragged_key(column)]
            dtype = torch.uint8 if column.kind == "object" else DTYPES[column.dtype]
            self._values[column.name] = torch.empty(int(sizes.sum()), *column.shape, dtype=dtype)
            self._columns[column.name] = ByteColumn.of(self._values[column.name], sizes)

    def column(self, name: str) -> ByteColumn:
        """The memory of a column."""
        return self._columns[name]

    def take(self, held: HeldRows, at: Int, places: Int) -> None:
        """Copy rows that this rank already has from their `places` there to the places `at` here."""
        for column in self.schema if len(at) else ():
            if column.kind == "object":
                values = held.batch.objects(column.name)
                self._objects[column.name] |= {
                    to: values[place] for to, place in zip(at.tolist(), places.tolist(), strict=True)
                }
            else:
                copy(ByteRuns([(held.column(column.name), places)]), ByteRuns([(self.column(column.name), at)]))

    def batch(self) -> Batch:
        """The rows, once all bytes have arrived."""
        return Batch(torch.from_numpy(self.ids), {column.name: self._column(column) for column in self.schema})

    def _column(self, column: ColumnSchema) -> Column:
        values = self._values[column.name]
        if column.kind == "dense":
            return values
        if column.kind == "jagged":
            return Jagged(values, torch.from_numpy(self._lengths[ragged_key(column)]), column.axis)
        store, here = self.column(column.name), self._objects[column.name]
        ends = (store.starts + store.sizes).tolist()
        return tuple(
            here[place] if place in here else json.loads(store.data[start:end].tobytes())
            for place, (start, end) in enumerate(zip(store.starts.tolist(), ends, strict=True))
        )
