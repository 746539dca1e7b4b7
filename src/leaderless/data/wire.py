"""Batches as bytes: a schema that both sides know, and columns packed one behind the other. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leaderless.config import Json
from leaderless.data.batch import Batch, Column, Jagged

ALIGNMENT = 8
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
    match column:
        case Tensor():
            return ColumnSchema(name, "dense", _dtype_name(name, column), tuple(column.shape[1:]), "")
        case Jagged(values=values, axis=axis):
            return ColumnSchema(name, "jagged", _dtype_name(name, values), tuple(values.shape[1:]), axis)
        case _:
            return ColumnSchema(name, "object", "json", (), "")


def _dtype_name(name: str, values: Tensor) -> str:
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise TypeError(f"column '{name}' is {dtype}, which cannot travel; use one of {', '.join(DTYPES)}")
    return dtype


def schema_to_json(schema: Schema) -> str:
    """The schema as text."""
    return json.dumps([[c.name, c.kind, c.dtype, list(c.shape), c.axis] for c in schema])


def schema_from_json(text: str) -> Schema:
    """The schema that `schema_to_json` wrote."""
    return tuple(ColumnSchema(n, kind, dtype, tuple(shape), axis) for n, kind, dtype, shape, axis in json.loads(text))


def pack(batch: Batch) -> Tensor:
    """The ids and own columns of a batch as bytes.

    Args:
        batch: Its prompts do not travel along; they are packed as a batch of their own.

    Returns:
        [num_bytes] uint8.
    """
    parts = [torch.tensor([len(batch)]), batch.ids]
    for name, column in sorted(batch.columns.items()):
        match column:
            case Tensor():
                parts.append(column)
            case Jagged():
                parts += [column.lengths, column.values]
            case _:
                texts = [to_json(name, value) for value in column]
                parts.append(torch.tensor([len(text) for text in texts], dtype=torch.int64))
                parts.append(torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8) if any(texts) else _EMPTY)
    sizes = [part.numel() * part.element_size() for part in parts]
    message = torch.zeros(sum(map(_aligned, sizes)), dtype=torch.uint8)
    offset = 0
    for part, size in zip(parts, sizes, strict=True):
        message[offset : offset + size] = part.contiguous().reshape(-1).view(torch.uint8)
        offset += _aligned(size)
    return message


_EMPTY = torch.empty(0, dtype=torch.uint8)


def to_json(name: str, value: Json) -> bytes:
    """A value of an object column as text.

    Args:
        name: Name of the column, for the error.
        value: Value that JSON can hold.

    Raises:
        TypeError: It cannot.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"column '{name}' holds a value that JSON cannot hold: {error}") from error
    return text.encode("utf-8", "surrogatepass")  # text from the web may hold half a character


def what_changes(value: object) -> str:
    """What of a value would be something else after it has travelled to another rank.

    Returns:
        As `tuple (1, 2)`; empty when all of it is plain.
    """
    try:
        return _what_changes(value)
    except RecursionError:
        return f"{type(value).__name__} that is nested too deeply"


def _what_changes(value: object) -> str:
    kind = type(value)  # exactly: NumPy's float64 is a float too, and would arrive as another
    if kind in _PLAIN:
        return ""
    if isinstance(value, list) and kind is list:
        return next((found for item in value if (found := _what_changes(item))), "")
    if isinstance(value, dict) and kind is dict:
        for key in value:
            if type(key) is not str:
                return f"key {_short(key)} of a dict"
        return next((found for item in value.values() if (found := _what_changes(item))), "")
    return f"{kind.__name__} {_short(value)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unpack(message: Tensor, schema: Schema) -> tuple[Batch, int]:
    """The batch that `pack` made bytes of. Tensors are views of the message: nothing is copied.

    Args:
        message: [num_bytes] uint8, in host memory; may continue after the batch.
        schema: Schema of its columns.

    Returns:
        The batch, and how many bytes it took.
    """
    reader = _Reader(message)
    num_rows = int(reader.take(1, torch.int64, ()))
    ids = reader.take(num_rows, torch.int64, ())
    columns: dict[str, Column] = {}
    for column in schema:
        if column.kind == "dense":
            columns[column.name] = reader.take(num_rows, DTYPES[column.dtype], column.shape)
            continue
        lengths = reader.take(num_rows, torch.int64, ())
        if column.kind == "jagged":
            values = reader.take(int(lengths.sum()), DTYPES[column.dtype], column.shape)
            columns[column.name] = Jagged(values, lengths, column.axis)
        else:
            texts = bytes(reader.take(int(lengths.sum()), torch.uint8, ()).numpy())
            columns[column.name] = tuple(json.loads(text) for text in _split(texts, lengths.tolist()))
    return Batch(ids, columns), reader.offset


@dataclass
class _Reader:
    """Takes aligned tensors off a message, first to last."""

    message: Tensor
    offset: int = 0

    def take(self, num_values: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        count = num_values
        for size in shape:
            count *= size
        num_bytes = count * dtype.itemsize
        if self.offset + num_bytes > self.message.numel():
            raise RuntimeError(f"message ends at byte {self.message.numel()}, {self.offset + num_bytes} were expected")
        part = self.message[self.offset : self.offset + num_bytes].view(dtype)
        self.offset += _aligned(num_bytes)
        return part.view(num_values, *shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _split(text: bytes, lengths: Sequence[int]) -> list[bytes]:
    parts: list[bytes] = []
    start = 0
    for length in lengths:
        parts.append(text[start : start + length])
        start += length
    return parts
