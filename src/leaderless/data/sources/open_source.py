"""From the name of a dataset in a recipe to its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.data import COMPRESSED, DatasetConfig
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.files import find_files
from leaderless.data.sources.hub import HubSource, HubStream
from leaderless.data.sources.jsonl import JsonlSource
from leaderless.data.sources.parquet import ParquetSource
from leaderless.data.sources.row_sources import (
    ConcatenatedSource,
    Row,
    RowSource,
    RowStream,
    file_fingerprint,
    read_lines,
)
from leaderless.planner import format_ranks


class FileStream(RowStream):
    """The rows of files, one file after the other."""

    def __init__(self, config: DatasetConfig, files: Sequence[Path]) -> None:
        self.files, self._columns = files, config.wanted_columns()
        for path in (path for path in files if path.suffix == ".parquet"):
            ParquetSource(path)  # a damaged one is found at once

    @override
    def rows(self) -> Iterator[tuple[str, Row]]:
        for path in self.files:
            is_parquet = path.suffix == ".parquet"
            yield from ParquetSource(path, self._columns).rows() if is_parquet else read_lines(path, self._columns)

    @override
    def fingerprint(self) -> str:
        return json.dumps(list(map(file_fingerprint, self.files)))


def open_source(config: DatasetConfig, key: str, cache: DataCache | None = None) -> RowSource:
    """Open a dataset whose rows are read in any order. All ranks of the cache call it together.

    Raises:
        RecipeError: It does not exist, cannot be read, or has no rows.
        RuntimeError: Ranks have different datasets of this name.
    """
    cache = cache or DataCache()
    files = find_files(config, key)
    if files is None:
        source: RowSource = HubSource(config)
    else:
        packed = next((file for file in files if file.name.endswith(COMPRESSED)), None)
        if packed is not None:
            remedy = "unpack it" if key == "data.evaluation" else "set `streaming: true`, or unpack it"
            raise RecipeError.at(f"{key}.path", f"{packed} can only be read from its beginning: {remedy}")
        kinds: dict[str, type[JsonlSource | ParquetSource]] = {".jsonl": JsonlSource, ".parquet": ParquetSource}
        sources: list[RowSource] = [kinds[file.suffix](file, config.wanted_columns()) for file in files]
        source = sources[0] if len(sources) == 1 else ConcatenatedSource(sources)
    _check_same(source, config, key, cache)
    source.prepare(cache)
    if not len(source):
        raise RecipeError.at(f"{key}.path", f"{config.path} has no rows")
    return source


def open_stream(config: DatasetConfig, key: str, cache: DataCache | None = None) -> RowStream:
    """Open a dataset whose rows are read in their order; errors as of `open_source`."""
    files = find_files(config, key)
    stream = HubStream(config) if files is None else FileStream(config, files)
    _check_same(stream, config, key, cache or DataCache())
    return stream


def _check_same(dataset: RowSource | RowStream, config: DatasetConfig, key: str, cache: DataCache) -> None:
    """Stop on all ranks if some opened different rows: each rank reads the rows that it needs."""
    process_group = cache.process_group
    others = process_group.unlike_first(dataset.fingerprint(), f"the datasets of all workers for {key}")
    if others:
        raise RuntimeError(
            f"rank {process_group.rank}: ranks {format_ranks(others)} have other data for {key} than rank "
            f"{process_group.ranks[0]} (here {config.path}): give all machines the same files"
        )
