"""Folders of runs to log, and a logger that writes what it is given to a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.observability.line_file import StepLog
from leaderless.observability.loggers.protocol import LoggedRun, LoggedTable, Numbers
from leaderless.observability.run_directory import RunDirectory

SAMPLE = {
    "prompt": "1+1=",
    "response": "2 <b>é</b>",
    "answer": "2",
    "reward": 1.0,
    "is_valid": True,
    "is_truncated": False,
    "advantage": 0.5,
    "details": {"exact_match": {"value": 1.0}},
}


class Notes:
    """Writes a JSON line for each call; the first `fails` calls of `write` raise, and each takes `naps_s`."""

    def __init__(self, path: str, fails: int = 0, naps_s: float = 0.0, can_rewind: bool = True) -> None:
        self._path, self._fails, self._naps_s, self._can_rewind = Path(path), fails, naps_s, can_rewind

    def open(self, run: LoggedRun, identity: str) -> str:
        self._note("open", run.name, identity, os.getpid())
        return identity or "first"

    def rewind(self, log: str, step: int) -> bool:
        self._note("rewind", log, step)
        return self._can_rewind

    def write(self, numbers: Sequence[Numbers]) -> None:
        time.sleep(self._naps_s)
        if self._fails:
            self._fails -= 1
            raise ConnectionError("no answer")
        for log, step, values in numbers:
            self._note("write", log, step, values)

    def write_table(self, table: LoggedTable) -> None:
        self._note("table", table.name, table.step, list(table.columns), [list(row) for row in table.rows])

    def write_file(self, path: Path) -> None:
        self._note("file", path.name)

    def close(self) -> None:
        self._note("close")

    def _note(self, *facts: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(facts) + "\n")


def notes(path: Path, kind: str = "") -> list[list[object]]:
    """The calls that a `Notes` has written down, all or those of one kind without it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line[1:] if kind else line for line in lines if not kind or line[0] == kind]


def begin(folder: Path) -> RunDirectory:
    """A folder of a run without a step."""
    directory = RunDirectory(folder)
    directory.path.mkdir(parents=True)
    directory.config.write_text(
        "name: trial\nsteps: 4\nrun:\n  tags: [b, second try]\nreward:\n  own.module:grade:\n    weight: 1.0\n"
    )
    return directory


def steps(directory: RunDirectory, numbers: Mapping[int, Mapping[str, float]], log: str = "") -> None:
    """Log steps as a run does, from the first of them on: what was logged of later ones is dropped."""
    written = StepLog(directory, log)
    written.open(min(numbers))
    for step, values in numbers.items():
        written.write(step, values)
