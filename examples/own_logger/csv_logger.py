"""A logger that writes the numbers of a run to a file that spreadsheets open."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from leaderless.observability.loggers.protocol import LoggedRun, LoggedTable, Numbers


class CsvLogger:
    """Writes a row for each number: log, step, name and value."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def open(self, run: LoggedRun, identity: str) -> str:
        """Begin the file, or continue the one of an earlier start."""
        if not identity:
            self._path.write_text("", encoding="utf-8")
            self._append([("run", "log", "step", "name", "value")])
        self._name = run.name
        return str(self._path)

    def rewind(self, log: str, step: int) -> bool:  # noqa: ARG002
        """Say that rows stay when a run continues from an earlier step."""
        return False

    def write(self, numbers: Sequence[Numbers]) -> None:
        """Append the numbers of some steps."""
        self._append([(self._name, log, step, *pair) for log, step, values in numbers for pair in values.items()])

    def write_table(self, table: LoggedTable) -> None:
        """Leave samples out."""

    def write_file(self, path: Path) -> None:
        """Leave the report out."""

    def close(self) -> None:
        """Keep nothing open."""

    def _append(self, rows: Sequence[Sequence[object]]) -> None:
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
