"""Rows of Parquet files, and their copies as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.data import DatasetConfig
from leaderless.data.sources.disk_cache import DataCache, whole_file
from leaderless.data.sources.jsonl import JsonlSource
from leaderless.data.sources.row_sources import (
    ConcatenatedSource,
    FileSource,
    Row,
    RowSource,
    file_fingerprint,
    first_rows,
    plain_row,
)

if TYPE_CHECKING:
    import pyarrow as pa

GROUPS_KEPT = 8
"""Row groups that are kept in memory: rows are read out of order, but not far from each other."""
ROWS_AT_A_TIME = 1024
DONE = "parts.json"
"""File that lists the parts of a folder, with their fingerprints, when all of them are complete."""


class ParquetSource(FileSource):
    """Rows of a Parquet file; a row group is read when one of its rows is, and the last few are kept."""

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        super().__init__(path, columns)
        try:
            self._file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
            names = self._file.schema_arrow.names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise RecipeError.at("data", f"{path} is not a readable Parquet file: {error}") from error
        self._names = [name for name in names if columns is None or name in columns]
        self._sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])
        self._group = lru_cache(maxsize=GROUPS_KEPT)(self._read_group)

    @override
    def prepare(self, cache: DataCache) -> None:
        """Nothing to do: the footer of the file locates its row groups."""

    def _read_group(self, group: int) -> pa.Table:
        import pyarrow as pa

        return pa.Table.from_batches(list(self._batches(group, self._sizes[group])))

    def _batches(self, group: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of a row group, some at a time."""
        num_rows = 0
        with self._damage_named(group):
            for batch in self._file.iter_batches(batch_rows, row_groups=[group], columns=self._names):
                num_rows += len(batch)
                yield batch
            if num_rows != self._sizes[group]:  # where pages are missing, pyarrow just stops
                raise OSError(f"it holds {num_rows} rows, but its footer says {self._sizes[group]}")

    @contextmanager
    def _damage_named(self, group: int) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise RecipeError.at(
                "data", f"{self.path} is damaged in row group {group}: {error}; copy or write it again"
            ) from error

    @override
    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def row(self, index: int) -> Row:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        with self._damage_named(group):
            (values,) = self._group(group).slice(index - int(self._starts[group]), 1).to_pylist()
        return plain_row(values, self.describe(index))

    @override
    def read(self, first: int, last: int) -> Iterator[Row]:
        index = first
        for group in range(*np.searchsorted(self._starts, [first, last]).tolist()):
            for batch in self._batches(group, ROWS_AT_A_TIME):
                with self._damage_named(group):
                    rows = batch.to_pylist()
                for values in rows:
                    yield plain_row(values, self.describe(index))
                    index += 1

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All rows from the first, each with its place, for errors."""
        for index, row in enumerate(self.read(0, len(self))):
            yield self.describe(index), row

    @override
    def blocks(self) -> list[int]:
        return list(self._sizes)

    @override
    def describe(self, index: int) -> str:
        return f"{self.path} row {index}"


class UnpackedSource(ConcatenatedSource):
    """The rows of a source as they were written to JSON lines; each is still named by its place in the source."""

    def __init__(self, source: RowSource, parts: list[Path]) -> None:
        super().__init__([JsonlSource(part) for part in parts])
        self.original = source

    @override
    def describe(self, index: int) -> str:
        return self.original.describe(index)

    @override
    def version(self) -> str:
        return self.original.version()


def _needs_unpacking(source: RowSource) -> bool:
    """Whether reading one row means reading many."""
    return isinstance(source, ParquetSource) or (
        isinstance(source, ConcatenatedSource) and any(map(_needs_unpacking, source.parts))
    )


def unpack(source: RowSource, config: DatasetConfig, cache: DataCache) -> RowSource:
    """Write the rows of a source as JSON lines into the cache, unless an earlier start has done so.

    Reading one row of a Parquet file means decoding its row group, in a random order nearly all of the file in every
    step. Each rank reads and writes a share of whole blocks, so that no part is read twice. All ranks call it together.
    Where the cache has no folder, the source stays as it is.
    """
    columns = config.wanted_columns()
    kept: Json = None if columns is None else sorted(columns)
    num_rows = first_rows(source, config)
    folder = cache.path("rows", [source.version(), kept, num_rows], "")
    if folder is None or not _needs_unpacking(source):
        return source
    parts = _parts(folder)
    if not cache.all_agree(is_true=parts is not None):
        _write_share(source, num_rows, folder, cache)
        parts = _parts(folder)
    assert parts is not None, f"{folder} has just been written"
    unpacked = UnpackedSource(source, parts)
    unpacked.prepare(cache)
    return unpacked


def _parts(folder: Path) -> list[Path] | None:
    """The files that hold the unpacked rows; None where they are not there, or not as they were written."""
    try:
        written = json.loads((folder / DONE).read_text(encoding="utf-8"))
        is_whole = all(file_fingerprint(folder / name) == fingerprint for name, fingerprint in written.items())
    except (OSError, ValueError, AttributeError):
        return None
    return [folder / name for name in written] if is_whole else None


def _write_share(source: RowSource, num_rows: int, folder: Path, cache: DataCache) -> None:
    """Write this rank's part of the first rows, and when all have done so the list of files."""
    ends = [end for end in accumulate(source.blocks(), initial=0) if end < num_rows]
    ends += [next(end for end in accumulate(source.blocks()) if end >= num_rows)]
    share = cache.share(num_rows)
    # A block belongs to the rank that has its middle row.
    mine = [i for i in range(len(ends) - 1) if (ends[i] + min(num_rows, ends[i + 1])) // 2 in share]
    size = cache.process_group.size
    names = [f"part-{place:05d}-of-{size:05d}.jsonl" for place in range(size)]
    name = names[cache.process_group.ranks.index(cache.process_group.rank)]
    with whole_file(folder / name) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in source.read(ends[mine[0]], ends[mine[-1] + 1]) if mine else ():
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    cache.process_group.sum(torch.zeros(1), f"the rows in {folder}")
    if cache.is_first:
        written = {name: file_fingerprint(folder / name) for name in names}
        with whole_file(folder / DONE) as temporary:
            temporary.write_text(json.dumps(written), encoding="utf-8")
    cache.process_group.sum(torch.zeros(1), f"the rows in {folder}")
