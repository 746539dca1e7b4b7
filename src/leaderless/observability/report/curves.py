"""Metrics over steps, and how long ones are thinned so that a browser stays quick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from leaderless.observability.report.untrusted import as_number, as_step

MAX_POINTS = 2000
"""Largest number of points of a curve on the page."""


@dataclass(frozen=True)
class Series:
    """One metric.

    Attributes:
        steps: Steps at which it was logged, ascending.
        values: Logged values; None where one was no finite number.
    """

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @cached_property
    def finite(self) -> tuple[tuple[int, float], ...]:
        """Step and value of every finite point."""
        return tuple((step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None)

    def recent(self, share: float) -> tuple[tuple[int, float], ...]:
        """The last finite points, at least one if there is any.

        Args:
            share: Their share of all points, from 0 to 1.
        """
        return self.finite[-max(1, round(share * len(self.finite))) :]


def last_rows(rows: Sequence[Mapping[str, object]]) -> dict[int, Mapping[str, object]]:
    """Rows by step, ascending; of a step that was run again after a resume the last row.

    Args:
        rows: Lines of `metrics.jsonl`; those without a step are passed over.
    """
    by_step: dict[int, Mapping[str, object]] = {}
    for row in rows:
        step = as_step(row.get("step"))
        if step is not None:
            by_step[step] = row
    return dict(sorted(by_step.items()))


def collect_series(rows: Mapping[int, Mapping[str, object]]) -> dict[str, Series]:
    """All metrics in the rows, in order of their first appearance.

    Args:
        rows: Rows by step, ascending.
    """
    points: dict[str, list[tuple[int, float | None]]] = {}
    for step, row in rows.items():
        for name, value in row.items():
            # Writers put null for NaN, which JSON does not have; text is no metric.
            if name not in {"step", "time_s"} and (value is None or isinstance(value, int | float)):
                points.setdefault(name, []).append((step, as_number(value)))
    return {
        name: Series(tuple(step for step, _ in logged), tuple(value for _, value in logged))
        for name, logged in points.items()
    }


def duration_s(rows: Mapping[int, Mapping[str, object]]) -> float | None:
    """Seconds that the rows took, or None when no row says.

    Args:
        rows: Rows by step, ascending; `time_s` may begin again at 0 after a resume.
    """
    total, previous = 0.0, 0.0
    times = [time for row in rows.values() if (time := as_number(row.get("time_s"))) is not None]
    for time in times:
        total += time - previous if time >= previous else time
        previous = time
    return total if times else None


def thin(series: Series, max_points: int = MAX_POINTS) -> Series:
    """The series with fewer points; every spike of it is still there.

    The points between the first and the last are cut into equal runs, and the lowest and the highest of each are kept.

    Args:
        series: A series of any length.
        max_points: Largest number of points, at least 4.
    """
    count = len(series.steps)
    if count <= max_points:
        return series
    num_runs = (max_points - 2) // 2
    kept = {0, count - 1}
    for run in range(num_runs):
        indices = range(1 + run * (count - 2) // num_runs, 1 + (run + 1) * (count - 2) // num_runs)
        finite = [(value, index) for index in indices if (value := series.values[index]) is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        else:
            kept.add(indices[0])
    order = sorted(kept)
    return Series(tuple(series.steps[i] for i in order), tuple(series.values[i] for i in order))


def mean_per_run(series: Mapping[str, Series], max_runs: int) -> tuple[list[int], dict[str, list[float]]]:
    """Several series on one grid, so that they can be stacked; a step on which one was not logged counts as 0.

    Args:
        series: Metrics by name.
        max_runs: Largest number of runs of equal length over which steps are averaged.

    Returns:
        The first step of each run, and for each name the mean over the run.
    """
    steps = sorted({step for one in series.values() for step in one.steps})
    num_runs = min(max_runs, len(steps))
    bounds = [run * len(steps) // num_runs for run in range(num_runs + 1)] if steps else [0]
    means: dict[str, list[float]] = {}
    for name, one in series.items():
        values = dict(one.finite)
        runs = [steps[bounds[run] : bounds[run + 1]] for run in range(num_runs)]
        means[name] = [sum(values.get(step, 0.0) for step in run) / len(run) for run in runs]
    return [steps[bound] for bound in bounds[:-1]], means
