"""Hashes of rows: of their ids and of the bytes of their numeric columns, whichever rank holds them.

    hash of a row = BLAKE2b-120(names of columns, ids, sizes, bytes of the row's columns, hash of its prompt)

Columns of the same axis are hashed together, value by value, and those of a prompt once, however many rows share it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.data.batch import Batch, Jagged

HASH_BYTES = 15
Bytes = npt.NDArray[np.uint8]


class RecordedColumn(NamedTuple):
    """A column of a row, byte by byte.

    Attributes:
        axis: Axis along which its values lie; empty for a dense column.
        dtype: Type of the values.
        data: [values, bytes of a value] uint8.
    """

    axis: str
    dtype: str
    data: Bytes

    def to_json(self) -> Json:
        """The column as JSON; bytes are in base 64."""
        return [self.axis, self.dtype, self.data.shape[1], base64.b64encode(self.data.tobytes()).decode()]

    @classmethod
    def from_json(cls, value: Sequence[str | int]) -> Self:
        """The column of a record."""
        axis, dtype, width, text = value
        data = np.frombuffer(base64.b64decode(str(text), validate=True), dtype=np.uint8)
        return cls(str(axis), str(dtype), data.reshape(-1, max(1, int(width))))


class _Block:
    """The columns of one axis as bytes, value by value."""

    def __init__(self, axis: str, columns: Mapping[str, RecordedColumn], ends: Sequence[int]) -> None:
        """Columns of several rows; `ends` are the index of the first value of each row, and of the last one's end."""
        self.axis, self._columns, self._ends = axis, columns, ends
        together = np.concatenate([one.data for one in columns.values()], axis=1)
        width, data = together.shape[1], together.tobytes()
        self.rows = [data[begin:end] for begin, end in pairwise([end * width for end in ends])]

    @property
    def names(self) -> list[Json]:
        """Axis, name and type of each column."""
        return [[self.axis, name, one.dtype] for name, one in self._columns.items()]

    def row(self, place: int) -> dict[str, RecordedColumn]:
        """The columns of a row."""
        begin, end = self._ends[place], self._ends[place + 1]
        return {name: one._replace(data=one.data[begin:end]) for name, one in self._columns.items()}


class HashedRows:
    """Rows by those of some columns that are numeric, of rows and of their prompts, and the hash of each.

    Attributes:
        hashes: Hash of each row.
    """

    def __init__(self, batch: Batch, names: Collection[str]) -> None:
        """Hash the rows of a batch by the columns with some names."""
        self._own = _blocks(batch, names)
        self._shared = None if batch.prompts is None else _blocks(batch.prompts, names)
        self._index = [] if batch.prompt_index is None else batch.prompt_index.tolist()
        prompts = [b""] * len(batch)
        if batch.prompts is not None and self._shared is not None:
            shared = _hashes(self._shared, batch.prompts.ids[:, None], [b""] * len(batch.prompts))
            prompts = [shared[place] for place in self._index]
        hashes = _hashes(self._own, torch.stack([batch.ids, batch.group_ids], dim=1), prompts)
        self.hashes = [int.from_bytes(one, "little") for one in hashes]

    def row(self, place: int) -> RecordedRow:
        """The bytes of a row."""
        prompt = None if self._shared is None else _row(self._shared, self._index[place])
        return RecordedRow(_row(self._own, place), prompt)


def _blocks(batch: Batch, names: Collection[str]) -> list[_Block]:
    """The columns of a batch with some names, by their axes."""
    found: dict[str, dict[str, RecordedColumn]] = {}
    ends: dict[str, Sequence[int]] = {}
    for name in sorted(names):
        column = batch.columns.get(name)
        if isinstance(column, Jagged):
            found.setdefault(column.axis, {})[name] = _bytes_of(column.axis, column.values)
            ends[column.axis] = ends.get(column.axis) or column.offsets.tolist()
        elif isinstance(column, Tensor):
            found.setdefault("", {})[name] = _bytes_of("", column)
            ends[""] = range(len(batch) + 1)
    return [_Block(axis, columns, ends[axis]) for axis, columns in sorted(found.items())]


def _bytes_of(axis: str, values: Tensor) -> RecordedColumn:
    flat = values.detach().cpu().contiguous().reshape(len(values), -1) if len(values) else values.new_zeros(0, 1)
    return RecordedColumn(axis, str(values.dtype).removeprefix("torch."), flat.view(torch.uint8).numpy())


def _row(blocks: Sequence[_Block], place: int) -> dict[str, RecordedColumn]:
    return {name: column for block in blocks for name, column in block.row(place).items()}


def _hashes(blocks: Sequence[_Block], ids: Tensor, prompts: Sequence[bytes]) -> list[bytes]:
    """The hash of each row by its columns, its ids [n, m] and the hash of its prompt."""
    sizes = [torch.tensor([*map(len, block.rows)], dtype=torch.int64) for block in blocks]
    about = torch.cat([ids, *(one[:, None] for one in sizes)], dim=1)
    numbers, width = about.numpy().tobytes(), 8 * about.shape[1]
    head = json.dumps([block.names for block in blocks], separators=(",", ":")).encode()
    rows = zip(*(block.rows for block in blocks), prompts, strict=True)
    blake2b, join = hashlib.blake2b, b"".join
    return [
        blake2b(join((head, numbers[place * width : place * width + width], *row)), digest_size=HASH_BYTES).digest()
        for place, row in enumerate(rows)
    ]


class RecordedRow(NamedTuple):
    """The very bytes of a row, from which its hash follows.

    Attributes:
        columns: Its columns.
        prompt: Those of its prompt; None if it has none of its own.
    """

    columns: Mapping[str, RecordedColumn]
    prompt: Mapping[str, RecordedColumn] | None

    @classmethod
    def from_json(cls, value: Json) -> RecordedRow:
        """The row of a record.

        Raises:
            ValueError: It is not one.
        """
        try:
            found = cast("dict[str, dict[str, list[str | int]] | None]", value)
            columns, prompt = found["columns"], found["prompt"]
            assert columns is not None
            return cls(_decoded(columns), None if prompt is None else _decoded(prompt))
        except (TypeError, KeyError, AttributeError, AssertionError) as error:
            raise ValueError("the row is not one that a run records") from error

    def to_json(self) -> dict[str, Json]:
        """The row as JSON."""
        prompt = None if self.prompt is None else {name: one.to_json() for name, one in self.prompt.items()}
        return {"columns": {name: one.to_json() for name, one in self.columns.items()}, "prompt": prompt}

    def hash(self, sample_id: int, group_id: int) -> int:
        """The hash of the row, as of `HashedRows`."""
        prompt = b"" if self.prompt is None else _hash_of(self.prompt, [group_id], b"")
        return int.from_bytes(_hash_of(self.columns, [sample_id, group_id], prompt), "little")

    def values(self, name: str) -> list[float] | None:
        """The numbers of a column of the row or of its prompt; None if there is no such column."""
        column = self.columns.get(name) or (self.prompt or {}).get(name)
        if column is None:
            return None
        if not column.data.size:
            return []
        values: list[float] = torch.frombuffer(bytearray(column.data), dtype=getattr(torch, column.dtype)).tolist()
        return values


def _hash_of(columns: Mapping[str, RecordedColumn], ids: Sequence[int], prompt: bytes) -> bytes:
    axes: dict[str, dict[str, RecordedColumn]] = {}
    for name, column in sorted(columns.items()):
        axes.setdefault(column.axis, {})[name] = column
    blocks = [_Block(axis, some, [0, len(next(iter(some.values())).data)]) for axis, some in sorted(axes.items())]
    return _hashes(blocks, torch.tensor([ids]), [prompt])[0]


def _decoded(columns: Mapping[str, Sequence[str | int]]) -> dict[str, RecordedColumn]:
    return {name: RecordedColumn.from_json(value) for name, value in columns.items()}
