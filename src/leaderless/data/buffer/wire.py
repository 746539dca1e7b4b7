"""Columns as bytes: a schema that both sides know, and objects as JSON. Nothing is pickled."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Literal

import torch

from leaderless.base.values import Json
from leaderless.data.batch import Batch, Column, Jagged

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
    """The part of a value that would be something else on another rank, as `tuple (1, 2)`; empty if all is plain."""
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
