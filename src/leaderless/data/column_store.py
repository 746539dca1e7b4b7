"""The memory of a table's columns, on the side that sends rows and on the side that receives them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from leaderless.config import Json
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.byte_runs import ByteColumn, ByteRuns, Int
from leaderless.data.wire import DTYPES, ColumnSchema, Schema, schema_of, to_json

COPY_BYTES = 1 << 22
"""Rows that stay on a rank are copied in pieces of this size."""


def ragged_keys(schema: Schema) -> tuple[str, ...]:
    """What rows of a schema have lengths along: the axes of jagged columns, and the text of each object column."""
    return tuple(dict.fromkeys(_ragged_key(column) for column in schema if column.kind != "dense"))


def _ragged_key(column: ColumnSchema) -> str:
    return f"axis {column.axis}" if column.kind == "jagged" else f"text {column.name}"


@dataclass(frozen=True)
class _Texts:
    """The texts of an object column, made once and held once.

    Attributes:
        data: One text behind the other, in the order in which they were asked for.
        starts: [n] first byte of each row's text; -1 where it has not been asked for.
        sizes: [n] bytes of each text.
    """

    data: bytearray
    starts: Int
    sizes: Int

    @classmethod
    def none(cls, num_rows: int) -> _Texts:
        return cls(bytearray(), np.full(num_rows, -1, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))

    def add(self, place: int, text: bytes) -> None:
        self.starts[place], self.sizes[place] = len(self.data), len(text)
        self.data.extend(text)


class HeldRows:
    """Rows that a rank has, as bytes to send. Texts of objects are made when they are first asked for."""

    def __init__(self, batch: Batch) -> None:
        """Take the rows' own columns.

        Args:
            batch: The rows; its prompts are rows of their own.
        """
        self.batch = batch
        self._ids = batch.ids.numpy()
        self._texts: dict[str, _Texts] = {}
        self._columns: dict[str, ByteColumn] = {}

    @cached_property
    def _order(self) -> Int:
        return np.argsort(self._ids, kind="stable")

    def places(self, ids: Int) -> Int:
        """Where rows are.

        Args:
            ids: [m], any.

        Returns:
            [m]; -1 for those that are not here.
        """
        if not len(self._ids):
            return np.full(len(ids), -1, dtype=np.int64)
        found = self._order[np.searchsorted(self._ids, ids, sorter=self._order).clip(max=len(self._ids) - 1)]
        places: Int = np.where(self._ids[found] == ids, found, -1)
        return places

    def lengths(self, key: str, places: Int) -> Int:
        """Lengths of some rows.

        Args:
            key: One of the schema's `ragged_keys`.
            places: [m] of the rows.

        Returns:
            [m] values, or bytes of text.
        """
        kind, name = key.split(" ", 1)
        if kind == "axis":
            return self._jagged(name).lengths.numpy()[places]
        self._columns.pop(name, None)
        values = self.batch.objects(name)
        texts = self._texts.setdefault(name, _Texts.none(len(values)))
        for place in places[texts.starts[places] < 0].tolist():
            texts.add(place, to_json(name, values[place]))
        return texts.sizes[places]

    def _jagged(self, axis: str) -> Jagged:
        return next(
            column for column in self.batch.columns.values() if isinstance(column, Jagged) and column.axis == axis
        )

    def column(self, name: str) -> ByteColumn:
        """The memory of a column; of objects, of those whose lengths have been asked for."""
        if name not in self._columns:
            self._columns[name] = self._bytes_of(name, self.batch.columns[name])
        return self._columns[name]

    def _bytes_of(self, name: str, column: Column) -> ByteColumn:
        match column:
            case Tensor():
                return ByteColumn.of(column.contiguous(), np.ones(len(column), dtype=np.int64))
            case Jagged():
                return ByteColumn.of(column.values.contiguous(), column.lengths.numpy())
            case _:
                texts = self._texts.get(name) or _Texts.none(len(column))
                return ByteColumn(np.frombuffer(texts.data, dtype=np.uint8), texts.starts, texts.sizes)


class ArrivingRows:
    """Rows that a rank gets: their memory, allocated once and filled in place."""

    def __init__(self, schema: Schema, ids: Int, lengths: Mapping[str, Int]) -> None:
        """Allocate the columns.

        Args:
            schema: Types of the columns.
            ids: [n] of the rows.
            lengths: [n] for each of the schema's `ragged_keys`; 0 bytes for objects that are here already.
        """
        self.schema, self.ids, self._lengths = schema, ids, lengths
        self._objects: dict[str, dict[int, Json]] = {}
        self._values = {column.name: self._allocate(column) for column in schema}
        self._columns = {
            column.name: ByteColumn.of(self._values[column.name], self._sizes(column)) for column in schema
        }

    def _sizes(self, column: ColumnSchema) -> Int:
        """[n] values of each row."""
        if column.kind == "dense":
            return np.ones(len(self.ids), dtype=np.int64)
        return self._lengths[_ragged_key(column)]

    def _allocate(self, column: ColumnSchema) -> Tensor:
        dtype = torch.uint8 if column.kind == "object" else DTYPES[column.dtype]
        return torch.empty(int(self._sizes(column).sum()), *column.shape, dtype=dtype)

    def column(self, name: str) -> ByteColumn:
        """The memory of a column."""
        return self._columns[name]

    def take(self, held: HeldRows, at: Int, places: Int) -> None:
        """Copy rows that this rank has already.

        Args:
            held: Rows of which these are some.
            at: [m] places where they go.
            places: [m] places where they are.
        """
        if not len(at):
            return
        for column in self.schema:
            if column.kind == "object":
                values = held.batch.objects(column.name)
                taken = self._objects.setdefault(column.name, {})
                taken |= {to: values[place] for to, place in zip(at.tolist(), places.tolist(), strict=True)}
                continue
            source = ByteRuns([(held.column(column.name), places)])
            target = ByteRuns([(self.column(column.name), at)])
            for begin in range(0, source.size, COPY_BYTES):
                end = min(begin + COPY_BYTES, source.size)
                lying = source.view(begin, end)
                if lying is None:
                    lying = np.empty(end - begin, dtype=np.uint8)
                    source.read(begin, lying)
                target.write(begin, lying)

    def batch(self) -> Batch:
        """The rows, when all bytes are there."""
        return Batch(torch.from_numpy(self.ids), {column.name: self._column(column) for column in self.schema})

    def _column(self, column: ColumnSchema) -> Column:
        values = self._values[column.name]
        match column.kind:
            case "dense":
                return values
            case "jagged":
                return Jagged(values, torch.from_numpy(self._sizes(column)), column.axis)
            case _:
                store, here = self.column(column.name), self._objects.get(column.name, {})
                ends = (store.starts + store.sizes).tolist()
                return tuple(
                    here[place] if place in here else json.loads(store.data[start:end].tobytes())
                    for place, (start, end) in enumerate(zip(store.starts.tolist(), ends, strict=True))
                )


def merge(ids: Tensor, parts: Sequence[tuple[Tensor, Column]]) -> Column:
    """A column of rows that lie in several parts, each copied once, straight to where it belongs.

    Args:
        ids: [n] of all rows, ascending.
        parts: Ids and values of rows; a row that is in several has the same value in each. One without rows may not
            know the type of its values, so the first that has some decides.
    """
    filled = [Batch(part, {"column": column}) for part, column in parts if len(part)]
    if not filled:
        return parts[0][1]
    (schema,) = schema_of(filled[0])
    at = [torch.searchsorted(ids, batch.ids).numpy() for batch in filled]
    lengths = {key: np.zeros(len(ids), dtype=np.int64) for key in ragged_keys((schema,))}
    tables = [HeldRows(batch) for batch in filled]
    for table, places in zip(tables, at, strict=True):
        for key, values in lengths.items():
            if key.startswith("axis "):
                values[places] = table.lengths(key, np.arange(len(places)))
    arriving = ArrivingRows((schema,), ids.numpy(), lengths)
    for table, places in zip(tables, at, strict=True):
        arriving.take(table, places, np.arange(len(places)))
    return arriving.batch().columns["column"]
