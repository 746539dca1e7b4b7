"""Rows of tables, from sources, which give any row, or from streams, which give one after the other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import numpy as np
from typing_extensions import override

from leaderless.config import Json, RecipeError
from leaderless.data.cache import DataCache

Row = dict[str, Json]

BLOCK_ROWS = 1024
"""Rows that are divided among ranks together, where the format does not say otherwise."""
DIGEST_BYTES = 1 << 16
"""Bytes at each end of a file by which it is recognized."""


class RowSource(Protocol):
    """A dataset whose rows can be read in any order."""

    def prepare(self, cache: DataCache) -> None:
        """Find where rows are, before any is read. All ranks call it together, and each looks at a share.

        Args:
            cache: Results of earlier starts.
        """

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int) -> Row:
        """One row by column."""

    def read(self, first: int, last: int) -> Iterator[Row]:
        """Rows one behind the other, with little in memory.

        Args:
            first: First row of a block.
            last: First row after a block.
        """
        return map(self.row, range(first, last))

    def blocks(self) -> list[int]:
        """Numbers of rows that are read at a time, block by block; they add up to all rows."""
        whole, rest = divmod(len(self), BLOCK_ROWS)
        return [BLOCK_ROWS] * whole + [rest] * bool(rest)

    def describe(self, index: int) -> str:
        """Where a row is, for errors: a file and line, or a dataset and number."""

    def bytes_read(self) -> int:
        """Bytes of its files that this rank has read."""

    def fingerprint(self) -> str:
        """Tells the dataset from others of its name without reading it whole: by its size and its two ends."""

    def version(self) -> str:
        """Tells the dataset from itself before a change, on one machine."""


class FileRows:
    """What readers of a file share.

    Attributes:
        path: The file.
        columns: Columns that rows keep; None for all.
    """

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        self.path, self.columns, self._bytes = path, columns, 0

    def bytes_read(self) -> int:
        """Bytes that this rank has read."""
        return self._bytes

    def fingerprint(self) -> str:
        """Size and both ends of the file."""
        return file_fingerprint(self.path)

    def version(self) -> str:
        """Name, fingerprint and time of change of the file."""
        return file_version(self.path)


class ConcatenatedSource(RowSource):
    """The rows of several sources, one behind the other."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self.parts = sources
        self._starts = np.zeros(1, dtype=np.int64)

    @override
    def bytes_read(self) -> int:
        return sum(source.bytes_read() for source in self.parts)

    @override
    def prepare(self, cache: DataCache) -> None:
        for source in self.parts:
            source.prepare(cache)
        self._starts = np.concatenate([[0], np.cumsum([len(source) for source in self.parts], dtype=np.int64)])

    @override
    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, index: int) -> tuple[RowSource, int]:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.parts[part], index - int(self._starts[part])

    @override
    def row(self, index: int) -> Row:
        source, inner = self._find(index)
        return source.row(inner)

    @override
    def read(self, first: int, last: int) -> Iterator[Row]:
        for source, start, end in zip(self.parts, self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True):
            if first < end and start < last:
                yield from source.read(max(first, start) - start, min(last, end) - start)

    @override
    def blocks(self) -> list[int]:
        return [block for source in self.parts for block in source.blocks()]

    @override
    def describe(self, index: int) -> str:
        source, inner = self._find(index)
        return source.describe(inner)

    @override
    def fingerprint(self) -> str:
        return json.dumps([source.fingerprint() for source in self.parts])

    @override
    def version(self) -> str:
        return json.dumps([source.version() for source in self.parts])


class RowStream(Protocol):
    """A dataset whose rows can be read one behind the other only."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All rows from the first, each with where it is, for errors."""

    def bytes_read(self) -> int:
        """Bytes of its files that this rank has read."""

    def fingerprint(self) -> str:
        """Tells the dataset from others of its name without reading it whole."""


def parse_line(text: bytes, place: str, columns: Collection[str] | None) -> Row:
    """A row from its JSON.

    Args:
        text: A line.
        place: Location of the line, for errors.
        columns: Columns that are kept; None for all.

    Raises:
        RecipeError: It is no row.
    """
    try:
        row = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecipeError.at("data", f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecipeError.at("data", f"{place} must be an object with the columns as its keys")
    if b"\\ud" in text.lower() and _is_unwritable(row):
        raise RecipeError.at("data", f"{place} holds half of a surrogate pair, which is not text")
    return row if columns is None else {column: value for column, value in row.items() if column in columns}


def plain_row(values: Mapping[str, object], place: str) -> Row:
    """A row of what JSON can hold, as rows travel and are recorded as JSON; dates and decimals become text.

    Raises:
        RecipeError: A column holds what JSON cannot.
    """
    row: Row = {}
    for column, value in values.items():
        try:
            row[column] = json.loads(json.dumps(value, default=_as_text))
        except (TypeError, ValueError) as error:
            raise RecipeError.at(
                "data",
                f"{place}: column '{column}' holds {error}, which a row cannot carry: "
                "leave it out of the file, or name the others in `columns`",
            ) from error
    return row


def file_fingerprint(path: Path) -> str:
    """Of a file: its size and its two ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(DIGEST_BYTES))
        file.seek(max(0, size - DIGEST_BYTES))
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"


def file_version(path: Path) -> str:
    """Of a file: its name, its fingerprint, and when it was changed."""
    return f"{path.resolve()} {file_fingerprint(path)} {path.stat().st_mtime_ns}"


def _is_unwritable(row: Row) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _as_text(value: object) -> str:
    match value:
        case date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case _:
            raise TypeError(type(value).__name__)
