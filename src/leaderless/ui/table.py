"""The numbers of a run in memory, read once and then only as far as its files grow."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leaderless.observability.growing_file import GrowingFile
from leaderless.observability.report.curves import MAX_POINTS, Series

MISSING = math.nan
"""Value of a metric that was not logged at a step; infinity stands for one that is not finite."""
NOT_FINITE = math.inf
_NO_METRICS = frozenset({"step", "time_s"})


class StepTable:
    """All metrics of a run over its steps, as the report has them: what other logs know of a step is added to it.

    Attributes:
        directory: Folder of the run.
        generation: Number of times that steps were dropped, because the run did them again.
        seconds: Value of `time_s` at each step.
    """

    def __init__(self, directory: Path) -> None:
        """Nothing is read yet."""
        self.directory = directory
        self._files = {"": GrowingFile(directory / "metrics.jsonl")}
        self._steps = array("q")
        self._row_of: dict[int, int] = {}
        self._columns: dict[str, array[float]] = {}
        self._others: dict[int, dict[str, float]] = {}
        self.seconds = array("d")
        self.generation = 0

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    @property
    def steps(self) -> Sequence[int]:
        """Steps, ascending."""
        return self._steps

    @property
    def names(self) -> Sequence[str]:
        """Metrics, in the order in which they first appear."""
        return list(self._columns)

    def read(self) -> None:
        """Read what has been added to the files."""
        for path in sorted(self.directory.glob("metrics-*.jsonl")):
            file = self._files.setdefault(path.name, GrowingFile(path))
            for line in file.new_lines():
                step = line.record.get("step")
                if isinstance(step, int) and not isinstance(step, bool):
                    self._add_other(step, _numbers(line.record))
        for line in self._files[""].new_lines():
            step = line.record.get("step")
            if isinstance(step, int) and not isinstance(step, bool):
                self._add(step, _numbers(line.record), line.record.get("time_s"))

    def column(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps at which a metric was logged, and its values; one that is not finite is infinite."""
        values = np.array(self._columns.get(name, ()), dtype=np.float64)
        steps = np.array(self._steps[: len(values)], dtype=np.int64)
        is_logged = ~np.isnan(values)
        return steps[is_logged], values[is_logged]

    def thinned(self, name: str, max_points: int = MAX_POINTS) -> Series:
        """A metric with at most so many points, the lowest and highest of each run among them, as `thin` has them."""
        steps, values = self.column(name)
        count = len(steps)
        if count > max_points:
            kept = _kept(values, max_points)
            steps, values = steps[kept], values[kept]
        return _series(steps, values)

    def full(self, name: str) -> Series:
        """A metric with all of its points."""
        return _series(*self.column(name))

    def since(self, name: str, row: int) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric from a row of the table on."""
        points = zip(self._steps[row:], self._columns.get(name, array("d"))[row:], strict=False)
        logged = [(step, value) for step, value in points if not math.isnan(value)]
        return [step for step, _ in logged], [value if math.isfinite(value) else None for _, value in logged]

    def _add(self, step: int, numbers: Mapping[str, float], time_s: object) -> None:
        if self._steps and step <= self._steps[-1]:
            self._drop_from(step)
        self._row_of[step] = len(self._steps)
        self._steps.append(step)
        self.seconds.append(float(time_s) if isinstance(time_s, int | float) else MISSING)
        self._set(len(self._steps) - 1, {**self._others.pop(step, {}), **numbers})

    def _add_other(self, step: int, numbers: Mapping[str, float]) -> None:
        row = self._row_of.get(step)
        if row is None:
            self._others.setdefault(step, {}).update(numbers)
            if step == 0 and not self._steps:
                self._add(0, {}, None)  # held-out prompts are answered before the first step
        else:
            known = {name for name in numbers if row < len(self._columns.get(name, ()))}
            self._set(row, {name: value for name, value in numbers.items() if not self._has(name, row, known)})

    def _has(self, name: str, row: int, known: set[str]) -> bool:
        return name in known and not math.isnan(self._columns[name][row])

    def _set(self, row: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            column = self._columns.setdefault(name, array("d"))
            if len(column) <= row:
                column.extend([MISSING] * (row + 1 - len(column)))
            column[row] = value

    def _drop_from(self, step: int) -> None:
        """Drop a step and those after it, which the run does again."""
        row = int(np.searchsorted(np.array(self._steps), step))
        for dropped in self._steps[row:]:
            self._row_of.pop(dropped, None)
        del self._steps[row:], self.seconds[row:]
        for name, column in list(self._columns.items()):
            del column[row:]
            if all(map(math.isnan, column)):
                del self._columns[name]
        self.generation += 1


class FullSeries(Mapping[str, Series]):
    """All metrics of a table with all of their points, each made when it is asked for."""

    def __init__(self, table: StepTable) -> None:
        self._table, self._made = table, dict[str, Series]()
        self._names = dict.fromkeys(table.names)

    def __getitem__(self, name: str) -> Series:
        """The metric, or a KeyError."""
        if name not in self._names:
            raise KeyError(name)
        if name not in self._made:
            self._made[name] = self._table.full(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._names)

    def __len__(self) -> int:
        """The number of metrics."""
        return len(self._names)


def _numbers(record: Mapping[str, object]) -> dict[str, float]:
    found = {}
    for name, value in record.items():
        if name in _NO_METRICS:
            continue
        if value is None:
            found[name] = NOT_FINITE
        elif isinstance(value, int | float):
            found[name] = float(value) if abs(value) < 1e308 else NOT_FINITE
    return found


def _kept(values: NDArray[np.float64], max_points: int) -> NDArray[np.int64]:
    """Places of the points that are kept: see `thin`."""
    count = len(values)
    num_runs = (max_points - 2) // 2
    bounds = 1 + np.arange(num_runs + 1) * (count - 2) // num_runs
    kept = [0, count - 1]
    low = values  # what is not finite is infinity here
    high = np.where(np.isinf(values), -np.inf, values)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        least, most = begin + int(low[begin:end].argmin()), end - 1 - int(high[begin:end][::-1].argmax())
        kept += [least, most] if np.isfinite(low[least]) else [begin]
    return np.unique(np.array(kept))


def _series(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Series:
    numbers = [value if math.isfinite(value) else None for value in values.tolist()]
    return Series(tuple(steps.tolist()), tuple(numbers))
