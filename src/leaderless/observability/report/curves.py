"""Metrics over steps, and how long series are thinned so that a browser stays quick."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from leaderless.observability.report.unchecked_values import as_number, as_step

MAX_POINTS = 2000
"""Largest number of points of a curve on the page."""

Steps = NDArray[np.int64]
Numbers = NDArray[np.float64]


class Series:
    """One metric: the steps at which it was logged, ascending, and its values."""

    def __init__(self, steps: Sequence[int] | Steps, values: Sequence[float | None] | Numbers) -> None:
        """Take n steps and n values, of which None or NaN stands for one that is not finite."""
        self.step_array: Steps = np.asarray(steps, dtype=np.int64)  # [n]
        self.value_array: Numbers = np.asarray(values, dtype=np.float64)  # [n], NaN for those that are not finite

    def __len__(self) -> int:
        """Number of points."""
        return len(self.step_array)

    def __eq__(self, other: object) -> bool:
        """Whether all points are the same."""
        return (
            isinstance(other, Series)
            and np.array_equal(self.step_array, other.step_array)
            and np.array_equal(self.value_array, other.value_array, equal_nan=True)
        )

    def __hash__(self) -> int:
        """A number that is the same for the same points."""
        return hash((self.steps, self.values))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps."""
        return tuple(self.step_array.tolist())

    @property
    def values(self) -> tuple[float | None, ...]:
        """The values, None for those that are not finite."""
        return tuple(value if math.isfinite(value) else None for value in self.value_array.tolist())

    @cached_property
    def finite(self) -> Series:
        """The points with finite values."""
        is_finite = ~np.isnan(self.value_array)
        return self if is_finite.all() else self.at(is_finite)

    def at(self, places: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Series:
        """The points at some places."""
        return Series(self.step_array[places], self.value_array[places])

    def point(self, place: int) -> tuple[int, float]:
        """Step and value of a point; NaN if the value is not finite."""
        return int(self.step_array[place]), float(self.value_array[place])

    def recent(self, share: float) -> Series:
        """The last finite points: this share of them, but at least one if there is any."""
        return self.finite.at(slice(-max(1, round(share * len(self.finite))), None))


def last_rows(rows: Sequence[Mapping[str, object]]) -> dict[int, Mapping[str, object]]:
    """Lines of `metrics.jsonl` by step, ascending; the last line of a step that was run again after a resume."""
    by_step = {step: row for row in rows if (step := as_step(row.get("step"))) is not None and -(2**63) <= step < 2**63}
    return dict(sorted(by_step.items()))


def collect_series(rows: Mapping[int, Mapping[str, object]]) -> dict[str, Series]:
    """All metrics of rows by step, in the order in which they first appear."""
    points: dict[str, dict[int, float | None]] = {}
    for step, row in rows.items():
        for name, value in row.items():
            # NaN, which JSON does not have, was written as null; text is not a metric.
            if name not in {"step", "time_s"} and (value is None or isinstance(value, int | float)):
                points.setdefault(name, {})[step] = as_number(value)
    return {name: Series(tuple(logged), tuple(logged.values())) for name, logged in points.items()}


def duration_s(rows: Mapping[int, Mapping[str, object]]) -> float | None:
    """Seconds that all steps took; None if no row says. After a resume, `time_s` may begin at 0 again."""
    times = [time for row in rows.values() if (time := as_number(row.get("time_s"))) is not None]
    passed = (time - before if time >= before else time for before, time in pairwise([0.0, *times]))
    return sum(passed) if times else None


def thin(series: Series, max_points: int = MAX_POINTS) -> Series:
    """The series with at most `max_points` (four or more) points, every spike among them.

    The points between the first and the last are divided into equal runs; the first of the lowest and the last of the
    highest of each are kept, or the first point of a run without a finite value.
    """
    count = len(series)
    if count <= max_points:
        return series
    num_runs = (max_points - 2) // 2
    bounds = 1 + np.arange(num_runs + 1) * (count - 2) // num_runs
    inner, begins = series.value_array[1 : count - 1], bounds[:-1] - 1
    run_of = np.repeat(np.arange(num_runs), np.diff(bounds))
    # NaN equals nothing, so that runs of NaN alone have no lowest and no highest value.
    is_lowest = inner == np.fmin.reduceat(inner, begins)[run_of]
    is_highest = inner == np.fmax.reduceat(inner, begins)[run_of]
    kept = np.zeros(count, dtype=bool)
    kept[[0, -1]] = True
    kept[bounds[:-1][~np.logical_or.reduceat(is_lowest, begins)]] = True
    lowest, highest = np.flatnonzero(is_lowest), np.flatnonzero(is_highest)
    kept[1 + lowest[np.flatnonzero(np.diff(run_of[lowest], prepend=-1))]] = True
    kept[1 + highest[np.flatnonzero(np.diff(run_of[highest], append=num_runs))]] = True
    return series.at(kept)


def mean_per_run(series: Mapping[str, Series], max_runs: int) -> tuple[list[int], dict[str, list[float]]]:
    """Means of several series over at most `max_runs` runs of neighboring steps, so that they can be stacked.

    A step on which a series was not logged counts as 0.

    Returns:
        The first step of each run, and for each name the mean over the run.
    """
    steps = all_steps(series.values())
    if not len(steps):
        return [], {name: [] for name in series}
    num_runs = min(max_runs, len(steps))
    bounds = np.arange(num_runs + 1) * len(steps) // num_runs
    means = {}
    for name, one in series.items():
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, one.finite.step_array)] = one.finite.value_array
        means[name] = (np.add.reduceat(values, bounds[:-1]) / np.diff(bounds)).tolist()
    return steps[bounds[:-1]].tolist(), means


def all_steps(series: Iterable[Series]) -> Steps:
    """[n] steps at which any of some series was logged, ascending."""
    found: Steps = np.array([], dtype=np.int64)
    for one in series:
        if not np.array_equal(found, one.step_array):  # most are logged at each step
            found = union(found, one.step_array)
    return found


def union(one: Steps, other: Steps) -> Steps:
    """[n] steps that are in one of two ascending arrays, or in both, ascending."""
    both = np.sort(np.concatenate([one, other]), kind="stable")  # faster than `np.union1d`, as halves are in order
    return both[np.diff(both, prepend=both[:1] - 1) > 0]
