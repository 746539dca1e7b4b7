"""The journal of a logger, which keeps a run that continues from sending anything twice."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

IDENTITY, NUMBERS, TABLE = "identity", "numbers", "table"


class SentJournal:
    """The journal of a logger, in the folder of the run. Steps come with a checksum of their line.

    Attributes:
        identity: Identity of the tracker's run; empty if none has begun.
        tables: Tables that were sent, by name and step.
    """

    def __init__(self, path: Path) -> None:
        """Read what earlier starts have written."""
        self._path = path
        self.identity = ""
        self.tables: set[tuple[str, int]] = set()
        self._sums: dict[str, dict[int, int]] = {}
        self._last: dict[str, int] = {}
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        self._is_cut_off = bool(text) and not text.endswith("\n")
        for line in text.splitlines():
            try:
                kind, *rest = json.loads(line)
                self._take(kind, *rest)
            except (ValueError, TypeError):
                continue  # cut off by a crash

    def last(self, log: str) -> int:
        """The last step of a log that was sent; -1 if there is none."""
        return self._last.get(log, -1)

    def has(self, log: str, step: int, line: bytes) -> bool:
        """Whether this line of a log was sent as the numbers of a step."""
        return self._sums.get(log, {}).get(step) == zlib.crc32(line)

    def begin(self, identity: str) -> None:
        """Record the identity of the tracker's run."""
        if identity != self.identity:
            self._add([(IDENTITY, identity)])

    def add_numbers(self, log: str, lines: Iterable[tuple[int, bytes]]) -> None:
        """Record steps of a log, each with its line."""
        self._add([(NUMBERS, log, step, zlib.crc32(line)) for step, line in lines])

    def add_table(self, name: str, step: int) -> None:
        """Record a table."""
        self._add([(TABLE, name, step)])

    def _add(self, entries: Iterable[tuple[object, ...]]) -> None:
        entries = list(entries)
        for entry in entries:
            self._take(*entry)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            if self._is_cut_off:
                file.write("\n")  # else the next entry would join one cut off by a crash
                self._is_cut_off = False
            file.write("".join(json.dumps(entry) + "\n" for entry in entries))

    def _take(self, kind: object, *rest: object) -> None:
        if kind == IDENTITY:
            (self.identity,) = map(str, rest)
        elif kind == TABLE:
            name, step = rest
            self.tables.add((str(name), int(str(step))))
        elif kind == NUMBERS:
            log, step, checksum = rest
            self._sums.setdefault(str(log), {})[int(str(step))] = int(str(checksum))
            self._last[str(log)] = int(str(step))
