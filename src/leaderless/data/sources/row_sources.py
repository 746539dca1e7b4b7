"""Rows of tables: of sources, which give any row, or of streams, which give rows in sequence."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig, TrainingSetConfig

if TYPE_CHECKING:
    from leaderless.data.sources.disk_cache import DataCache

Row = dict[str, Json]

BLOCK_ROWS = 1024
"""Rows that are divided among ranks together, where the format does not say otherwise."""
DIGEST_BYTES = 1 << 16
"""Bytes at each end of a file by which it is recognized."""


class RowSource(Protocol):
    """A dataset whose rows can be read in any order."""

    def prepare(self, cache: DataCache) -> None:
        """Locate rows before any is read. All ranks call it together, and each searches a share."""

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int) -> Row:
        """One row by column."""

    def read(self, first: int, last: int) -> Iterator[Row]:
        """Rows one after the other, with little in memory, from the first row of a block to the end of a block."""
        return map(self.row, range(first, last))

    def blocks(self) -> list[int]:
        """Numbers of rows that are read at a time, block by block; they add up to all rows."""
        whole, rest = divmod(len(self), BLOCK_ROWS)
        return [BLOCK_ROWS] * whole + [rest] * bool(rest)

    def describe(self, index: int) -> str:
        """Where a row is, for errors: a file and line, or a dataset and number."""

    def fingerprint(self) -> str:
        """Text that differs between datasets of one name, from the size and both ends: nothing is read whole."""

    def version(self) -> str:
        """Text that changes when the dataset does, on one machine."""
        return self.fingerprint()


class FileSource(RowSource):
    """A dataset in a file; `columns` are those that rows keep, None for all."""

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        self.path, self.columns = path, columns

    @override
    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    @override
    def version(self) -> str:
        return f"{self.path.resolve()} {self.fingerprint()} {self.path.stat().st_mtime_ns}"


class ConcatenatedSource(RowSource):
    """The rows of several sources, one after the other."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self.parts = sources
        self._starts = [0]

    @override
    def prepare(self, cache: DataCache) -> None:
        for source in self.parts:
            source.prepare(cache)
        self._starts = list(accumulate(map(len, self.parts), initial=0))

    @override
    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[RowSource, int]:
        part = bisect_right(self._starts, index) - 1
        return self.parts[part], index - self._starts[part]

    @override
    def row(self, index: int) -> Row:
        source, inner = self._find(index)
        return source.row(inner)

    @override
    def read(self, first: int, last: int) -> Iterator[Row]:
        for source, (start, end) in zip(self.parts, pairwise(self._starts), strict=True):
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


def first_rows(source: RowSource, config: DatasetConfig) -> int:
    """Number of rows of a source, from the first, that a dataset may use."""
    limit = config.limit if isinstance(config, TrainingSetConfig) else None
    return min(len(source), limit or len(source))


class RowStream(Protocol):
    """A dataset whose rows can only be read one after the other."""

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All rows from the first, each with its place, for errors."""

    def fingerprint(self) -> str:
        """Text that differs between datasets of one name, without reading them whole."""


def plain_row(values: Mapping[str, object], place: str) -> Row:
    """A row of values that JSON can hold, as rows are sent and recorded as JSON; dates and decimals become text.

    Raises:
        RecipeError: A column holds what JSON cannot.
    """
    row: Row = {}
    for column, value in values.items():
        try:
            row[column] = json.loads(json.dumps(_with_text_of_images(value), default=_as_text))
        except (TypeError, ValueError) as error:
            raise RecipeError.at(
                "data",
                f"{place}: column '{column}' holds {error}, which a row cannot carry: "
                "leave it out of the file, or name the others in `columns`",
            ) from error
    return row


def _with_text_of_images(value: object) -> object:
    """A value with the files of images, as the library `datasets` writes them into Parquet files, in base64."""
    if isinstance(value, list):
        return [_with_text_of_images(one) for one in value] if any(isinstance(one, dict) for one in value) else value
    if isinstance(value, dict) and value.keys() == {"bytes", "path"} and isinstance(data := value["bytes"], bytes):
        return {**value, "bytes": base64.b64encode(data).decode()}
    return value


def file_fingerprint(path: Path) -> str:
    """Size of a file, and a digest of both its ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(DIGEST_BYTES))
        file.seek(max(0, size - DIGEST_BYTES))
        digest.update(file.read())
    return f"{size} {digest.hexdigest()}"


def _as_text(value: object) -> str:
    match value:
        case date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case _:
            raise TypeError(type(value).__name__)


def parse_line(text: bytes, place: str, columns: Collection[str] | None) -> Row:
    """The row in a line of JSON at some place, with some columns or all; anything else is refused."""
    try:
        row = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise RecipeError.at("data", f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecipeError.at("data", f"{place} must be an object with the columns as its keys")
    if b"\\ud" in text.lower() and _is_unwritable(row):
        raise RecipeError.at("data", f"{place} holds half of a surrogate pair, which is not text")
    return row if columns is None else {column: value for column, value in row.items() if column in columns}


def _unique(pairs: list[tuple[str, Json]]) -> Row:
    """An object of JSON; of equal keys, Python would keep the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        raise ValueError(f"the key '{twice}' is written twice; keep one")
    return row


def read_lines(path: Path, columns: Collection[str] | None) -> Iterator[tuple[str, Row]]:
    """Rows of a JSON-lines file, perhaps compressed, one after the other, each with its place."""
    line = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for text in file:
                line += 1
                if text.strip():
                    place = f"{path}:{line}"
                    yield place, parse_line(text, place, columns)
    except (EOFError, OSError, zlib.error) as error:
        raise RecipeError.at(
            "data", f"{path} cannot be read beyond line {line}: {error}: it is damaged, copy it again"
        ) from error


def _is_unwritable(row: Row) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
