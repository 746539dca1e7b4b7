"""Metrics over steps, and how long series are thinned so that a browser stays quick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from leaderless.observability.report.untrusted import as_number, as_step

MAX_POINTS = 2000
"""Largest number of points of a curve on the page."""


@dataclass(frozen=True)
class Series:
    """One metric: the steps at which it was logged, ascending, and its values, None for those that are not finite."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @cached_property
    def finite(self) -> tuple[tuple[int, float], ...]:
        """Step and value of every finite point."""
        return tuple((step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None)

    def recent(self, share: float) -> tuple[tuple[int, float], ...]:
        """The last finite points: this share of them, but at least one if there is any."""
        return self.finite[-max(1, round(share * len(self.finite))) :]


def last_rows(rows: Sequence[Mapping[str, object]]) -> dict[int, Mapping[str, object]]:
    """Lines of `metrics.jsonl` by step, ascending; the last line of a step that was run again after a resume."""
    by_step = {step: row for row in rows if (step := as_step(row.get("step"))) is not None}
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

    The points between the first and the last are divided into equal runs; the lowest and the highest of each are kept.
    """
    count = len(series.steps)
    if count <= max_points:
        return series
    num_runs = (max_points - 2) // 2
    kept = {0, count - 1}
    for run in range(num_runs):
        indices = range(1 + run * (count - 2) // num_runs, 1 + (run + 1) * (count - 2) // num_runs)
        finite = [(value, index) for index in indices if (value := series.values[index]) is not None]
        kept |= {min(finite)[1], max(finite)[1]} if finite else {indices[0]}
    order = sorted(kept)
    return Series(tuple(series.steps[i] for i in order), tuple(series.values[i] for i in order))


def mean_per_run(series: Mapping[str, Series], max_runs: int) -> tuple[list[int], dict[str, list[float]]]:
    """Means of several series over at most `max_runs` runs of neighboring steps, so that they can be stacked.

    A step on which a series was not logged counts as 0.

    Returns:
        The first step of each run, and for each name the mean over the run.
    """
    steps = sorted({step for one in series.values() for step in one.steps})
    num_runs = min(max_runs, len(steps))
    bounds = [run * len(steps) // num_runs for run in range(num_runs + 1)] if steps else [0]
    runs = [steps[begin:end] for begin, end in pairwise(bounds)]
    values = {name: dict(one.finite) for name, one in series.items()}
    means = {name: [sum(of.get(step, 0.0) for step in run) / len(run) for run in runs] for name, of in values.items()}
    return [run[0] for run in runs], means
