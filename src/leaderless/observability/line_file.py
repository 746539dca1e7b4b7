"""Files of JSON objects, one a line: how a run writes them, and how others follow them. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from leaderless.base.values import Json
from leaderless.observability.clock import MayFail
from leaderless.observability.run_directory import RunDirectory, finite_or_none, read_lines, write_atomically


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


CHUNK_BYTES = 4 << 20
"""Largest number of bytes that are read at a time."""


class FileLine(NamedTuple):
    """A JSON object of a file, and its bytes in the file."""

    record: dict[str, object]
    text: bytes


class GrowingFile:
    """A file of JSON objects, one a line, that a run appends to, and replaces where it continues from a checkpoint.

    It need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_replaced = 0  # times that the file was replaced by another one
        self._inode, self._offset = -1, 0

    def new_lines(self) -> Iterator[FileLine]:
        """The added objects; a line that is incomplete, or not an object, is left out.

        If the file was replaced, all of its lines come again. A line whose consumer raises comes again, too.
        """
        for text in self._added(CHUNK_BYTES):
            for line in text[:-1].split(b"\n"):
                record = parse_line(line)
                if isinstance(record, dict):
                    yield FileLine(record, line)
                self._offset += len(line) + 1

    def new_text(self, chunk_bytes: int) -> Iterator[bytes]:
        """The added complete lines, each with its end, in pieces of about this size.

        If the file was replaced, all of its lines come again. A piece whose consumer raises comes again, too.
        """
        for text in self._added(chunk_bytes):
            yield text
            self._offset += len(text)

    def _added(self, chunk_bytes: int) -> Iterator[bytes]:
        """Complete lines from the offset on, which the consumer moves."""
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._inode or state.st_size < self._offset:
                self.num_replaced += self._inode != -1
                self._inode, self._offset = state.st_ino, 0
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(chunk_bytes):
                lines, end, rest = (rest + chunk).rpartition(b"\n")
                if end:
                    yield lines + end


def parse_line(line: bytes) -> object:
    """The value of a line of JSON; None for anything else."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class StepLog:
    """Writes the numbers of each step to `metrics.jsonl`; only one rank does so.

    A log with a name has a file to itself: `metrics-NAME.jsonl`.
    """

    def __init__(self, directory: RunDirectory, name: str = "") -> None:
        self.directory = directory
        self._lines = LineFile(directory.metrics_of(name), "step", directory.may_fail)

    def open(self, step: int) -> None:
        """Begin to log, or continue, at this step; what was logged of it and of later steps is dropped."""
        self._lines.cut_after(step - 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._lines.append(finite_or_none({"step": step, **numbers}))
