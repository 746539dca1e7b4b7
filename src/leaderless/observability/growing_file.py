"""Reads growing files of a run, and gives each line once. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CHUNK_BYTES = 4 << 20
"""Largest number of bytes that are read at a time."""


class FileLine(NamedTuple):
    """A JSON object of a file, and its bytes in the file."""

    record: dict[str, object]
    text: bytes


class GrowingFile:
    """A file of JSON objects, one a line, that a run appends to, and replaces where it continues from a checkpoint.

    Args:
        path: Path of the file, which need not exist yet.

    Attributes:
        num_replaced: Number of times that the file was replaced by another one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_replaced = 0
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
