"""Parquet has no way to a single row: before training its rows are written as JSON lines, which have one."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import torch
from typing_extensions import override

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


def unpack(source: RowSource, columns: frozenset[str] | None, cache: DataCache) -> RowSource:
    """Write the rows of a source as JSON lines into the run's folder, unless an earlier start has done so.

    Each rank reads and writes a share of whole blocks, so that no part of a file is read twice. All ranks call it
    together.

    Args:
        source: A dataset.
        columns: That its rows keep; None for all.
        cache: Whose folder is written to; without a folder the source stays as it is.
    """
    kept = None if columns is None else sorted(columns)
    folder = cache.path("rows", [source.version(), kept], "")
    if folder is None or not needs_unpacking(source):
        return source
    if not cache.all_agree(is_true=(folder / DONE).exists()):
        _write_share(source, folder, cache)
    names: list[str] = json.loads((folder / DONE).read_text(encoding="utf-8"))
    unpacked = UnpackedSource(source, [folder / name for name in names])
    unpacked.prepare(cache)
    assert len(unpacked) == len(source), f"{folder} does not hold the rows of its source"
    return unpacked


def _write_share(source: RowSource, folder: Path, cache: DataCache) -> None:
    """Write this rank's rows, and when all have done so the list of files."""
    ends = list(accumulate(source.blocks(), initial=0))
    share = cache.share(len(source))
    # A block belongs to the rank that has its middle row.
    mine = [i for i in range(len(ends) - 1) if (ends[i] + ends[i + 1]) // 2 in share]
    size = cache.group.size
    names = [f"part-{place:05d}-of-{size:05d}.jsonl" for place in range(size)]
    name = names[cache.group.ranks.index(cache.group.rank)]
    with whole_file(folder / name) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in source.read(ends[mine[0]], ends[mine[-1] + 1]) if mine else ():
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    cache.group.sum(torch.zeros(1), f"the rows in {folder}")
    if cache.is_first:
        with whole_file(folder / DONE) as temporary:
            temporary.write_text(json.dumps(names), encoding="utf-8")
    cache.group.sum(torch.zeros(1), f"the rows in {folder}")
