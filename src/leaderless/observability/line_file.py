"""A file of JSON objects, one a line, that a run appends to and cuts where it resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

from leaderless.base.values import Json
from leaderless.observability.clock import MayFail
from leaderless.observability.run_directory import read_lines, write_atomically


class LineFile:
    """A file that one process appends to, and any may read; each line is numbered, as by `step`."""

    def __init__(self, path: Path, number: str, may_fail: MayFail = nullcontext) -> None:
        """Number lines by their integer of the name `number`; writing happens in the context `may_fail`."""
        self.path, self._number, self._may_fail = path, number, may_fail
        self._unwritten = ""

    def append(self, record: Mapping[str, Json]) -> None:
        """Add a line, after those that could not be written before."""
        self._unwritten += json.dumps(record, allow_nan=False) + "\n"
        with self._may_fail(self.path):
            self.path.parent.mkdir(exist_ok=True)
            size = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self._unwritten)
            except OSError:
                os.truncate(self.path, size)  # the beginning of a line may have found room
                raise
            self._unwritten = ""

    def cut_after(self, last: int) -> None:
        """Drop the lines with a higher number: their steps are repeated."""
        if not self.path.exists():
            return
        kept = [record for record in read_lines(self.path, self._number) if int(str(record[self._number])) <= last]
        write_atomically(self.path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
