"""One file of metrics in memory, read once and then only as far as it grows."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np

from leaderless.observability.growing_file import GrowingFile
from leaderless.observability.report.curves import Numbers
from leaderless.serving.live_page.metric_rows import MISSING, MetricRows, read_rows

CHUNK_BYTES = 8 << 20
"""Size of the pieces in which a file is read, of which several threads read a part."""


class MetricsLog:
    """The numbers of a file of metrics by step, ascending. A step that comes again is the end of those before it.

    Attributes:
        steps: Steps.
        seconds: Value of `time_s` at each step.
        num_drops: Number of times that steps were dropped, because the run did them again.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._num_replaced = 0
        self._columns: dict[str, array[float]] = {}
        self.steps, self.seconds = array("q"), array("d")
        self.num_drops = 0

    @property
    def columns(self) -> Mapping[str, array[float]]:
        """Values of each metric from the first step to the last at which it was logged; see `MetricRows`."""
        return self._columns

    def read(self) -> bool:
        """Read what has been added to the file, and return whether anything has changed."""
        before = len(self.steps), self.num_drops
        for text in self._file.new_text(CHUNK_BYTES):
            self._forget_replaced()
            for rows in read_rows(text):
                self._add(rows)
        self._forget_replaced()
        return before != (len(self.steps), self.num_drops)

    def column(self, name: str, row: int = 0) -> Numbers:
        """[n] values of a metric from a row on, in memory of its own."""
        known = self._columns.get(name, array("d"))[row:]
        values = np.full(len(self.steps) - row, MISSING)
        values[: len(known)] = known
        return values

    def _forget_replaced(self) -> None:
        """Drop all steps if the file is another one than before: its lines come again."""
        if self._num_replaced != self._file.num_replaced:
            self._num_replaced = self._file.num_replaced
            self._drop_from_row(0)

    def _add(self, rows: MetricRows) -> None:
        cuts = np.flatnonzero(np.diff(rows.steps) <= 0) + 1
        for begin, end in pairwise([0, *cuts.tolist(), len(rows.steps)]):
            if begin == end:
                continue
            first = int(rows.steps[begin])
            if self.steps and first <= self.steps[-1]:
                self._drop_from_row(bisect_left(self.steps, first))
            row = len(self.steps)
            self.steps.frombytes(rows.steps[begin:end].tobytes())
            self.seconds.frombytes(rows.seconds[begin:end].tobytes())
            for name, values in rows.columns.items():
                self._append(name, row, values[begin:end])

    def _append(self, name: str, row: int, values: Numbers) -> None:
        if np.isnan(values).all():
            return
        column = self._columns.setdefault(name, array("d"))
        column.frombytes(np.full(row - len(column), MISSING).tobytes())
        column.frombytes(values.tobytes())

    def _drop_from_row(self, row: int) -> None:
        if row == len(self.steps):
            return
        del self.steps[row:], self.seconds[row:]
        for name, column in list(self._columns.items()):
            del column[row:]
            if np.isnan(column).all():
                del self._columns[name]
        self.num_drops += 1
