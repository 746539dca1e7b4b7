"""The numbers of a run in memory: the log of the loop that trains, and what other loops log about its steps."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leaderless.observability.line_file import GrowingFile
from leaderless.observability.report.curves import Numbers, Series, Steps, union
from leaderless.serving.live_page.metric_rows import MISSING, MetricRows, read_rows

CHUNK_BYTES = 8 << 20
"""Size of the pieces in which a file is read, of which several threads read a part."""


class MetricsLog:
    """The numbers of a file of metrics by step, ascending. A step that comes again is the end of those before it.

    Attributes:
        steps: Steps.
        seconds: Value of `time_s` at each step.
        columns: Values of each metric from the first step to the last at which it was logged; see `MetricRows`.
        num_drops: Number of times that steps were dropped, because the run did them again.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._num_replaced = 0
        self.columns: dict[str, array[float]] = {}
        self.steps, self.seconds = array("q"), array("d")
        self.num_drops = 0

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
        known = self.columns.get(name, array("d"))[row:]
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
                if not np.isnan(values[begin:end]).all():
                    column = self.columns.setdefault(name, array("d"))
                    column.frombytes(np.full(row - len(column), MISSING).tobytes())
                    column.frombytes(values[begin:end].tobytes())

    def _drop_from_row(self, row: int) -> None:
        if row == len(self.steps):
            return
        del self.steps[row:], self.seconds[row:]
        for name, column in list(self.columns.items()):
            del column[row:]
            if np.isnan(column).all():
                del self.columns[name]
        self.num_drops += 1


class StepTable:
    """All metrics of a run over its steps, as the report has them: what other logs know of a step is added to it.

    Attributes:
        directory: Folder of the run.
        steps: [n] steps, ascending.
        seconds: [n] values of `time_s` at each step, NaN where there is none.
        generation: Number of times that earlier rows were replaced, as when the run did steps again.
        revisions: Number of times that another log added values of a metric to earlier rows.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._main, self._others = MetricsLog(directory / "metrics.jsonl"), dict[str, MetricsLog]()
        self._num_drops = 0
        self._joined: dict[str, Numbers] | None = None
        self.steps: Steps = np.array([], dtype=np.int64)
        self.seconds: Numbers = np.array([])
        self.generation = 0
        self.revisions: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.steps)

    @property
    def names(self) -> Sequence[str]:
        """Metrics."""
        return list(self._main.columns if self._joined is None else self._joined)

    def read(self) -> None:
        """Read what has been added to the files."""
        for path in self.directory.glob("metrics-*.jsonl"):
            if path.name not in self._others:
                self._others[path.name] = MetricsLog(path)
        have_changed = [log.read() for log in (self._main, *self._others.values())]
        if any(have_changed):
            self._join()

    def series(self, name: str) -> Series:
        """A metric with all of its points."""
        values = self._column(name)
        is_logged = ~np.isnan(values)
        values[np.isinf(values)] = np.nan
        return Series(self.steps, values) if is_logged.all() else Series(self.steps[is_logged], values[is_logged])

    def since(self, name: str, row: int) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric from a row of the table on."""
        points = zip(self.steps[row:].tolist(), self._column(name, row).tolist(), strict=True)
        logged = [(step, value) for step, value in points if not math.isnan(value)]
        return [step for step, _ in logged], [value if math.isfinite(value) else None for _, value in logged]

    def _column(self, name: str, row: int = 0) -> Numbers:
        """Values of a metric from a row on, in memory of its own."""
        if self._joined is None:
            return self._main.column(name, row)
        return self._joined[name][row:].copy() if name in self._joined else np.full(len(self) - row, MISSING)

    def _join(self) -> None:
        """Add what other logs know about steps to the log of the loop that trains."""
        before, joined_before = self.steps, self._joined
        others = [log for _, log in sorted(self._others.items()) if log.steps]
        self.steps = np.array(self._main.steps, dtype=np.int64)
        if any(0 in log.steps[:1] for log in others):  # held-out prompts are answered before the first step
            self.steps = union(self.steps, np.array([0]))
        logs = [(log, _places(log, self.steps)) for log in (self._main, *others)]
        self.seconds = _first_known([_at(places, np.array(log.seconds)) for log, places in logs])
        self._joined = None
        if others:
            names = dict.fromkeys(name for log, _ in logs for name in log.columns)
            columns = {
                name: _first_known([_at(places, log.column(name)) for log, places in logs if name in log.columns])
                for name in names
            }
            self._joined = {name: values for name, values in columns.items() if not np.isnan(values).all()}
        if self._main.num_drops != self._num_drops or not np.array_equal(self.steps[: len(before)], before):
            self._num_drops = self._main.num_drops
            self.generation += 1
        else:
            for name, values in (self._joined or {}).items():
                known = (joined_before or {}).get(name)
                if known is None or not np.array_equal(known, values[: len(before)], equal_nan=True):
                    self.revisions[name] = self.revisions.get(name, 0) + 1


class AllSeries(Mapping[str, Series]):
    """All metrics of a table as they are now, each made when it is asked for."""

    def __init__(self, table: StepTable) -> None:
        self._table, self._made = table, dict[str, Series]()
        self._names = dict.fromkeys(table.names)

    def __getitem__(self, name: str) -> Series:
        """The metric, or a KeyError."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._table.series(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """The number of metrics."""
        return len(self._names)


def _places(log: MetricsLog, steps: Steps) -> NDArray[np.intp]:
    """[n] row of a log for each step, -1 where it has none."""
    own = np.array(log.steps, dtype=np.int64)
    places = np.searchsorted(own, steps)
    is_known = np.append(own, own[-1:] - 1)[places] == steps if len(own) else np.zeros(len(steps), dtype=bool)
    return np.where(is_known, places, -1)


def _at(places: NDArray[np.intp], values: Numbers) -> Numbers:
    return np.append(values, MISSING)[places]


def _first_known(columns: Sequence[Numbers]) -> Numbers:
    first, *others = columns
    for other in others:
        first = np.where(np.isnan(first), other, first)
    return first
