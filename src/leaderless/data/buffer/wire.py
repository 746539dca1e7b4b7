"""Columns as bytes: a schema that both sides know, and objects as JSON. Nothing is pickled.

The memory of columns is a sequence of bytes, on the rank that sends rows and on the rank that receives them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.base.values import Json
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.planner.assign.balance import Int

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.bfloat16, torch.float16, torch.float32, torch.float64,
    )
}  # fmt: skip

_PLAIN = frozenset({type(None), bool, int, float, str})


@dataclass(frozen=True)
class ColumnSchema:
    """How one column is stored.

    Attributes:
        name: Name of the column.
        kind: Kind of storage.
        dtype: Type of the values; `json` for objects.
        shape: Shape of one value.
        axis: Axis of a jagged column; empty for others.
    """

    name: str
    kind: Literal["dense", "jagged", "object"]
    dtype: str
    shape: tuple[int, ...]
    axis: str

    def __str__(self) -> str:
        """As in `'rewards' (dense float32)`."""
        along = f" along {self.axis}" if self.axis else ""
        return f"'{self.name}' ({self.kind} {self.dtype}{list(self.shape) or ''}{along})"


Schema = tuple[ColumnSchema, ...]


def schema_of(batch: Batch) -> Schema:
    """The schema of a batch's own columns, in order of their names."""
    return tuple(_column_schema(name, column) for name, column in sorted(batch.columns.items()))


def _column_schema(name: str, column: Column) -> ColumnSchema:
    if isinstance(column, tuple):
        return ColumnSchema(name, "object", "json", (), "")
    values, axis = (column.values, column.axis) if isinstance(column, Jagged) else (column, "")
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"column '{name}' is {dtype}, which cannot be sent; use one of {', '.join(DTYPES)}")
    kind: Literal["dense", "jagged"] = "jagged" if isinstance(column, Jagged) else "dense"
    return ColumnSchema(name, kind, dtype, tuple(values.shape[1:]), axis)


def schema_to_json(schema: Schema) -> str:
    """The schema as text."""
    return json.dumps([astuple(column) for column in schema])


def schema_from_json(text: str) -> Schema:
    """The schema that `schema_to_json` wrote."""
    return tuple(ColumnSchema(n, kind, dtype, tuple(shape), axis) for n, kind, dtype, shape, axis in json.loads(text))


def to_json(name: str, value: Json) -> bytes:
    """A value of the object column `name` as text; a value that JSON cannot hold is refused."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"column '{name}' holds a value that JSON cannot hold: {error}") from error
    return text.encode("utf-8", "surrogatepass")  # text from the web may hold half a character


def what_changes(value: object) -> str:
    """The part of a value that would be something else on another rank, as `tuple (1, 2)`; empty if all is plain.

    Raises:
        RecursionError: It is nested too deeply.
    """
    kind = type(value)  # exactly: NumPy's float64 is a float too, and would arrive as another
    if kind in _PLAIN:
        return ""
    if isinstance(value, list) and kind is list:
        return next((found for item in value if (found := what_changes(item))), "")
    if isinstance(value, dict) and kind is dict:
        for key in value:
            if type(key) is not str:
                return f"key {_short(key)} of a dict"
        return next((found for item in value.values() if (found := what_changes(item))), "")
    return f"{kind.__name__} {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
