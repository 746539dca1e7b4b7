"""Parquet has no way to a single row: before training its rows are written as JSON lines, which have one."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import torch
from typing_extensions import override

from leaderless.config import Json
from leaderless.config.data import DatasetConfig
from leaderless.data.cache import DataCache, whole_file
from leaderless.data.jsonl import JsonlSource
from leaderless.data.parquet import ParquetSource
from leaderless.data.rows import RowSource
from leaderless.data.sources import ConcatenatedSource

DONE = "parts.json"
"""Names the files of a folder when all of them are complete."""


class UnpackedSource(ConcatenatedSource):
    """The rows of a source as they were written to JSON lines; each is still named by where it came from."""

    def __init__(self, source: RowSource, parts: list[Path]) -> None:
        super().__init__([JsonlSource(part) for part in parts])
        self.original = source

    @override
    def bytes_read(self) -> int:
        return self.original.bytes_read() + super().bytes_read()

    @override
    def describe(self, index: int) -> str:
        return self.original.describe(index)

    @override
    def fingerprint(self) -> str:
        return self.original.fingerprint()

    @override
    def version(self) -> str:
        return self.original.version()


def needs_unpacking(source: RowSource) -> bool:
    """Whether reading a row means to read many.

    Args:
        source: Of a dataset.
    """
    return isinstance(source, ParquetSource) or (
        isinstance(source, ConcatenatedSource) and any(map(needs_unpacking, source.parts))
    )


def unpack(source: RowSource, config: DatasetConfig, cache: DataCache) -> RowSource:
    """Write the rows of a source as JSON lines into the run's folder, unless an earlier start has done so.

    Each rank reads and writes a share of whole blocks, so that no part of a file is read twice. All ranks call it
    together.

    Args:
        source: A dataset.
        config: Says how many of its rows are used, and which of their columns.
        cache: Whose folder is written to; without a folder the source stays as it is.
    """
    columns = config.wanted_columns()
    kept: Json = None if columns is None else sorted(columns)
    folder = cache.path("rows", [source.version(), kept, config.limit], "")
    if folder is None or not needs_unpacking(source):
        return source
    num_rows = min(len(source), config.limit or len(source))
    if not cache.all_agree(is_true=(folder / DONE).exists()):
        _write_share(source, num_rows, folder, cache)
    names: list[str] = json.loads((folder / DONE).read_text(encoding="utf-8"))
    unpacked = UnpackedSource(source, [folder / name for name in names])
    unpacked.prepare(cache)
    if len(unpacked) < num_rows:
        raise RuntimeError(f"{folder} holds {len(unpacked)} of {num_rows} rows: remove it, to have them written anew")
    return unpacked


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
        with whole_file(folder / DONE) as temporary:
            temporary.write_text(json.dumps(names), encoding="utf-8")
    cache.process_group.sum(torch.zeros(1), f"the rows in {folder}")
