"""Where the numbers of steps go: a file of lines, which loggers and pages read."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory, finite_or_none


class StepLog:
    """Writes the numbers of each step to `metrics.jsonl`; only one rank does so.

    A log with a name has a file to itself: `metrics-NAME.jsonl`.
    """

    def __init__(self, directory: RunDirectory, name: str = "") -> None:
        self.directory = directory
        self._lines = LineFile(directory.metrics_of(name), "step", directory.may_fail)

    def open(self, step: int) -> None:
        """Begin to log, or continue, at this step; what was logged of it and of later steps is dropped."""
        self._lines.cut_after(step - 1)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._lines.append(finite_or_none({"step": step, **numbers}))
