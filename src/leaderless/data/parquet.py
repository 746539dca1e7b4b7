"""Rows of Parquet files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.data.cache import DataCache
from leaderless.data.rows import Row, RowSource, file_fingerprint, file_version, plain_row

if TYPE_CHECKING:
    import pyarrow as pa

GROUPS_KEPT = 8
"""Row groups that are held: rows are asked for out of order, though not by far."""
ROWS_AT_A_TIME = 1024


class ParquetSource(RowSource):
    """Rows of a Parquet file; a row group is read when one of its rows is, and the last few are kept."""

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        """Open a file.

        Args:
            path: The file.
            columns: That are read; None for all.
        """
        import pyarrow as pa
        from pyarrow import parquet

        self.path, self._bytes = path, 0
        try:
            self._file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise RecipeError.at("data", f"{path} is not a readable Parquet file: {error}") from error
        names = self._file.schema_arrow.names
        self.columns = [name for name in names if columns is None or name in columns]
        self._sizes = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])
        self._group = lru_cache(maxsize=GROUPS_KEPT)(self._read_group)

    @override
    def prepare(self, cache: DataCache) -> None:
        """The file itself says where its row groups are."""

    def _read_group(self, group: int) -> pa.Table:
        import pyarrow as pa

        return pa.concat_tables(self._batches(group, self._sizes[group]))

    def _batches(self, group: int, num_rows: int) -> Iterator[pa.Table]:
        """A row group, so many rows at a time."""
        import pyarrow as pa

        metadata = self._file.metadata.row_group(group)
        chunks = [metadata.column(i) for i in range(metadata.num_columns)]
        wanted = set(self.columns)
        self._bytes += sum(c.total_compressed_size for c in chunks if c.path_in_schema.split(".")[0] in wanted)
        try:
            for batch in self._file.iter_batches(num_rows, row_groups=[group], columns=self.columns):
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise RecipeError.at("data", f"{self.path} is damaged in row group {group}: {error}") from error

    @override
    def __len__(self) -> int:
        return int(self._starts[-1])

    @override
    def row(self, index: int) -> Row:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = self._group(group).slice(index - int(self._starts[group]), 1)
        return plain_row(row.to_pylist()[0], self.describe(index))

    @override
    def read(self, first: int, last: int) -> Iterator[Row]:
        index = first
        for group in range(*np.searchsorted(self._starts, [first, last]).tolist()):
            for batch in self._batches(group, ROWS_AT_A_TIME):
                for values in batch.to_pylist():
                    yield plain_row(values, self.describe(index))
                    index += 1

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All rows from the first, each with where it is, for errors."""
        for index, row in enumerate(self.read(0, len(self))):
            yield self.describe(index), row

    @override
    def blocks(self) -> list[int]:
        return list(self._sizes)

    @override
    def describe(self, index: int) -> str:
        return f"{self.path} row {index}"

    @override
    def bytes_read(self) -> int:
        return self._bytes

    @override
    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    @override
    def version(self) -> str:
        return file_version(self.path)
