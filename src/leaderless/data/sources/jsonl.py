"""Rows of JSON-lines files, read in any order."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.data.sources.disk_cache import Arrays, DataCache
from leaderless.data.sources.row_sources import FileSource, Row, parse_line

SCAN_BYTES = 1 << 26
"""Bytes of a file that are searched together for line breaks."""
_WHITE_SPACE = np.frombuffer(b" \t\n\r\v\f", dtype=np.uint8)


class JsonlSource(FileSource):
    """Rows of a JSON-lines file: memory-mapped, each parsed when it is read.

    `pyarrow.json` and `datasets` give a column one type in all rows, know no line numbers for errors, and hold or write
    a copy of all rows. For 300,000 rows (183 MB) the index takes 0.4 s of CPU, `pyarrow.json.read_json` 1.4 s.
    """

    def __init__(self, path: Path, columns: Collection[str] | None = None) -> None:
        super().__init__(path, columns)
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""
        self._starts = self._lines = np.zeros(0, dtype=np.int64)

    @override
    def prepare(self, cache: DataCache) -> None:
        index = cache.kept("lines", self.version(), partial(self._find_rows, cache))
        self._starts, self._lines = (index[name].astype(np.int64) for name in ("starts", "lines"))

    def _find_rows(self, cache: DataCache) -> Arrays:
        """Where rows begin, and in which lines; each rank looks for the line breaks of its share of the file."""
        share = cache.share(len(self._data))
        starts, first_bytes = _find_lines(self._data, share)
        is_filled = np.ones(len(starts), dtype=np.bool_)
        for line in np.flatnonzero(np.isin(first_bytes, _WHITE_SPACE)).tolist():
            is_filled[line] = bool(self._data[starts[line] : self._end_of_line(int(starts[line]))].strip())
        filled = np.flatnonzero(is_filled)
        found = torch.from_numpy(np.stack([starts[filled], filled], axis=1))
        counts = cache.process_group.gather(torch.tensor([len(starts)]), f"the number of lines of {self.path}")
        parts = cache.process_group.gather(found, f"the lines of {self.path}")
        before = np.concatenate([[0], np.cumsum(torch.cat(counts).numpy())])
        lines = [part[:, 1].numpy() + int(first) for part, first in zip(parts, before[:-1], strict=True)]
        return {"starts": np.concatenate([part[:, 0].numpy() for part in parts]), "lines": np.concatenate(lines)}

    def _end_of_line(self, start: int) -> int:
        end = self._data.find(b"\n", start)
        return len(self._data) if end < 0 else end

    @override
    def __len__(self) -> int:
        return len(self._starts)

    @override
    def row(self, index: int) -> Row:
        start = int(self._starts[index])
        end = int(self._starts[index + 1]) if index + 1 < len(self._starts) else len(self._data)
        text = self._data[start:end].rstrip()  # blank lines may follow
        return parse_line(text, self.describe(index), self.columns)

    @override
    def describe(self, index: int) -> str:
        return f"{self.path}:{int(self._lines[index]) + 1}"


def _find_lines(data: mmap.mmap | bytes, share: range) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where lines begin in a part of a file, and the first byte of each."""
    starts, first_bytes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.uint8)]
    begins_line = share.start == 0 or data[share.start - 1 : share.start] == b"\n"
    ahead = np.full(int(begins_line), share.start, dtype=np.int64)  # of a line that begins with the next piece
    for begin in range(share.start, share.stop, SCAN_BYTES):
        piece = np.frombuffer(data, dtype=np.uint8, count=min(SCAN_BYTES, share.stop - begin), offset=begin)
        found = np.concatenate([ahead, np.flatnonzero(piece == ord("\n")) + begin + 1])
        is_here = found < begin + len(piece)
        ahead = found[~is_here]
        starts.append(found[is_here])
        first_bytes.append(piece[found[is_here] - begin])
    return np.concatenate(starts), np.concatenate(first_bytes)
