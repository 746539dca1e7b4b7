"""Gives a logger the output of a run, in order and once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from leaderless.observability.growing_file import FileLine, GrowingFile
from leaderless.observability.loggers.protocol import LoggedRun, Logger, Numbers
from leaderless.observability.loggers.sent_journal import SentJournal
from leaderless.observability.loggers.tables import tables_of

EVALUATION = "evaluation"
"""Log of evaluations on ranks that run ahead, written at few steps."""
BATCH_STEPS = 500
"""Largest number of steps that a logger gets at a time."""


class Follower:
    """Follows the folder of a run for one logger. Only checksums and one batch are kept in memory.

    Args:
        run: Run that is followed.
        logger: Logger, which is open.
        sent: Journal of its sent data.
        tables_every_steps: Steps between tables; 0 for none.
    """

    def __init__(self, run: LoggedRun, logger: Logger, sent: SentJournal, tables_every_steps: int) -> None:
        self._run, self._logger, self._sent, self._every = run, logger, sent, tables_every_steps
        self._files: dict[str, GrowingFile] = {}
        self._batch: list[tuple[Numbers, bytes]] = []
        self._due: list[tuple[str, int]] = []

    def follow(self, *, is_over: bool = False) -> None:
        """Send new data. If the logger raises, the next call continues with the same data.

        Args:
            is_over: Whether the run has ended, so that all files in the folder are complete.
        """
        self._flush()
        for path in sorted(self._run.directory.glob("metrics*.jsonl")):
            log = path.stem.removeprefix("metrics").removeprefix("-")
            file = self._files.setdefault(log, GrowingFile(path))
            for numbers, line in self._new(log, file):
                self._batch.append((numbers, line))
                if len(self._batch) == BATCH_STEPS:
                    self._flush()
            self._flush()
        self._send_tables(is_over=is_over)

    def finish(self, *files: Path) -> None:
        """Send the files of the run that exist at its end."""
        for path in files:
            if path.exists():
                self._logger.write_file(path)

    def _new(self, log: str, file: GrowingFile) -> Iterator[tuple[Numbers, bytes]]:
        for line in file.new_lines():
            step = line.record.get("step")
            if isinstance(step, int) and self._is_new(log, step, line):
                values = {
                    name: math.nan if value is None else float(value)
                    for name, value in line.record.items()
                    if name != "step" and (value is None or isinstance(value, int | float))
                }
                self._note_tables(log, step, values)
                yield Numbers(log, step, values), line.text

    def _is_new(self, log: str, step: int, line: FileLine) -> bool:
        """Whether to send a step: it is the next one, or was repeated and the tracker can forget the earlier values."""
        if self._batch and step <= self._batch[-1][0].step:
            self._flush()
        if step > self._sent.last(log):
            return True
        return not self._sent.has(log, step, line.text) and self._logger.rewind(log, step)

    def _note_tables(self, log: str, step: int, values: dict[str, float]) -> None:
        if not self._every:
            return
        if log != EVALUATION and step and (step == 1 or step % self._every == 0):
            self._due.append(("step", step))
        if any(name.startswith("evaluation/") for name in values):
            self._due.append(("evaluation", step))

    def _flush(self) -> None:
        if self._batch:
            self._logger.write([numbers for numbers, _ in self._batch])
            log = self._batch[0][0].log
            self._sent.add_numbers(log, [(numbers.step, line) for numbers, line in self._batch])
            self._batch.clear()

    def _send_tables(self, *, is_over: bool) -> None:
        """Send tables of steps after which every loop has ended another: by then all ranks have written their samples.

        A loop that runs ahead says nothing about the samples of one that is behind it.
        """
        last = min(self._sent.last(log) for log in {"", *self._files} - {EVALUATION})
        for kind, step in list(self._due):
            if step >= last and not is_over:
                continue
            for table in tables_of(self._run.directory, kind, step):
                if (table.name, step) not in self._sent.tables:
                    self._logger.write_table(table)
                    self._sent.add_table(table.name, step)
            self._due.remove((kind, step))
