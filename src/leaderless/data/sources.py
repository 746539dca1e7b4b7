"""Tables of rows on disk or on the hub, read row by row."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.config import Json, RecipeError
from leaderless.config.data import DatasetConfig

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Json]

SCAN_BYTES = 1 << 26
"""Bytes of a file that are looked at together for line breaks."""
DIGEST_BYTES = 1 << 16
"""Bytes at each end of a file that tell it from others."""
PARQUET_GROUPS_KEPT = 8
"""A shuffled order comes back to a row group again and again."""


class RowSource(Protocol):
    """A dataset whose rows can be read in any order."""

    def __len__(self) -> int:
        """Number of rows."""

    def row(self, index: int) -> Row:
        """One row by column.

        Args:
            index: From 0.
        """

    def describe(self, index: int) -> str:
        """Where a row is, for errors: a file and line, or a dataset and number."""

    def fingerprint(self) -> str:
        """Tells the dataset from others of its name without reading it whole: by its size and its two ends."""


class JsonlSource(RowSource):
    """Rows of a JSON-lines file: memory-mapped, each parsed when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        starts, first_bytes = _find_lines(self._data)
        self._bounds = np.append(starts, len(self._data))
        is_filled = np.ones(len(starts), dtype=np.bool_)
        for line in np.flatnonzero(np.isin(first_bytes, _WHITE_SPACE)).tolist():
            is_filled[line] = bool(self._data[self._bounds[line] : self._bounds[line + 1]].strip())
        self._lines = np.flatnonzero(is_filled)

    @override
    def __len__(self) -> int:
        return len(self._lines)

    @override
    def row(self, index: int) -> Row:
        line = int(self._lines[index])
        text = self._data[self._bounds[line] : self._bounds[line + 1]]
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RecipeError.at("data", f"{self.describe(index)} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RecipeError.at("data", f"{self.describe(index)} must be an object with the columns as its keys")
        if b"\\ud" in text.lower() and _is_unwritable(row):
            raise RecipeError.at("data", f"{self.describe(index)} holds half of a surrogate pair, which is not text")
        return row

    @override
    def describe(self, index: int) -> str:
        return f"{self.path}:{int(self._lines[index]) + 1}"

    @override
    def fingerprint(self) -> str:
        return _fingerprint(self.path)


class ParquetSource(RowSource):
    """Rows of a Parquet file; a row group is read when one of its rows is, and the last few are kept."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise RecipeError.at("data", f"{path} is not a readable Parquet file: {error}") from error
        sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._read_group = lru_cache(maxsize=PARQUET_GROUPS_KEPT)(self._read)

    def _read(self, group: int) -> pa.Table:
        import pyarrow as pa

        try:
            return self._file.read_row_group(group)
        except (pa.ArrowException, OSError) as error:
            raise RecipeError.at("data", f"{self.path} is damaged in row group {group}: {error}") from error

    @override
    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def row(self, index: int) -> Row:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = self._read_group(group).slice(index - int(self._starts[group]), 1)
        return _plain(row.to_pylist()[0], self.describe(index))

    @override
    def describe(self, index: int) -> str:
        return f"{self.path} row {index}"

    @override
    def fingerprint(self) -> str:
        return _fingerprint(self.path)


class HubSource(RowSource):
    """Rows of a dataset on the hub, through the `datasets` library and its cache."""

    def __init__(self, config: DatasetConfig) -> None:
        import datasets

        self.name = f"{config.path}/{config.subset or 'default'}/{config.split}"
        try:
            self._dataset = datasets.load_dataset(config.path, config.subset, split=config.split)
        except Exception as error:
            raise RecipeError.at(
                "data",
                f"'{config.path}' is no local file or folder, and the hub does not give it: "
                f"{type(error).__name__}: {error}",
            ) from error

    @override
    def __len__(self) -> int:
        return len(self._dataset)

    @override
    def row(self, index: int) -> Row:
        return _plain(self._dataset[index], self.describe(index))

    @override
    def describe(self, index: int) -> str:
        return f"{self.name} row {index}"

    @override
    def fingerprint(self) -> str:
        known = getattr(self._dataset, "_fingerprint", None)  # of name, version and split: no times, no folders
        return known if isinstance(known, str) else json.dumps([self.row(0), self.row(len(self) - 1)])


class ConcatenatedSource(RowSource):
    """The rows of several sources, one behind the other."""

    def __init__(self, sources: Sequence[RowSource]) -> None:
        self._sources = sources
        self._starts = np.concatenate([[0], np.cumsum([len(source) for source in sources], dtype=np.int64)])

    @override
    def __len__(self) -> int:
        return int(self._starts[-1])

    def _find(self, index: int) -> tuple[RowSource, int]:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._sources[part], index - int(self._starts[part])

    @override
    def row(self, index: int) -> Row:
        source, inner = self._find(index)
        return source.row(inner)

    @override
    def describe(self, index: int) -> str:
        source, inner = self._find(index)
        return source.describe(inner)

    @override
    def fingerprint(self) -> str:
        return json.dumps([[len(source), source.fingerprint()] for source in self._sources])


def open_source(config: DatasetConfig, key: str) -> RowSource:
    """Open a dataset.

    Args:
        config: Names a `.jsonl` or `.parquet` file, a folder of them, or a hub dataset.
        key: The recipe's section, for errors.

    Raises:
        RecipeError: It does not exist, cannot be read, or has no rows.
    """
    path = Path(config.path)
    source: RowSource
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _FORMATS)
        if not files:
            raise RecipeError.at(f"{key}.path", f"folder {path} holds no .jsonl or .parquet file")
        source = ConcatenatedSource([_FORMATS[file.suffix](file) for file in files])
    elif path.suffix in _FORMATS:
        if not path.exists():
            raise RecipeError.at(f"{key}.path", f"file {path} does not exist (looked for from {Path.cwd()})")
        source = _FORMATS[path.suffix](path)
    elif path.exists():
        raise RecipeError.at(f"{key}.path", f"{path} must end in .jsonl or .parquet")
    else:
        source = HubSource(config)
    if not len(source):
        raise RecipeError.at(f"{key}.path", f"{config.path} has no rows")
    return source


def _is_unwritable(row: Row) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _plain(values: Mapping[str, object], place: str) -> Row:
    """A row of what JSON can hold, as rows travel and are recorded as JSON; dates and decimals become text."""
    row: Row = {}
    for column, value in values.items():
        try:
            row[column] = json.loads(json.dumps(value, default=_as_text))
        except (TypeError, ValueError) as error:
            raise RecipeError.at(
                "data", f"{place}: column '{column}' holds {error}, which a row cannot carry: leave the column out"
            ) from error
    return row


_WHITE_SPACE = np.frombuffer(b" \t\n\r\v\f", dtype=np.uint8)


def _find_lines(data: mmap.mmap | bytes) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where lines begin, and the first byte of each."""
    starts, first_bytes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.uint8)]
    ahead = np.zeros(1, dtype=np.int64)  # of a line that begins with the next piece
    for begin in range(0, len(data), SCAN_BYTES):
        piece = np.frombuffer(data, dtype=np.uint8, count=min(SCAN_BYTES, len(data) - begin), offset=begin)
        found = np.concatenate([ahead, np.flatnonzero(piece == ord("\n")) + begin + 1])
        is_here = found < begin + len(piece)
        ahead = found[~is_here]
        starts.append(found[is_here])
        first_bytes.append(piece[found[is_here] - begin])
    return np.concatenate(starts), np.concatenate(first_bytes)


def _fingerprint(path: Path) -> str:
    """Of a file: its size and its two ends."""
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


_FORMATS: dict[str, type[JsonlSource] | type[ParquetSource]] = {
    ".jsonl": JsonlSource,
    ".parquet": ParquetSource,
}
