"""The interface of loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from leaderless.base.values import Json
from leaderless.observability.report.unchecked_values import as_list, as_mapping, as_text

Cell = None | bool | int | float | str


@dataclass(frozen=True)
class LoggedRun:
    """The run that is logged.

    Attributes:
        name: Name of the run.
        directory: Folder of the run.
        recipe: Resolved recipe.
    """

    name: str
    directory: Path
    recipe: Mapping[str, Json]

    @property
    def tags(self) -> tuple[str, ...]:
        """Words of `run.tags`."""
        return tuple(map(as_text, as_list(as_mapping(self.recipe.get("run")).get("tags"))))


class Numbers(NamedTuple):
    """Numbers of one step, reduced over all ranks; those that are not finite are NaN.

    Attributes:
        log: Name of the log; empty for the loop that trains. Loops that run ahead, and evaluations on their
            ranks, have logs of their own, which may be at other steps.
        step: Number of the step.
        values: Numbers by name, such as `reward/mean`.
    """

    log: str
    step: int
    values: Mapping[str, float]


class LoggedTable(NamedTuple):
    """Rows about one step.

    Attributes:
        name: `samples` or `episodes`, `evaluation/samples` or `evaluation/episodes`.
        step: Number of the step.
        columns: Names of the columns.
        rows: Values of each row, in the order of the columns.
    """

    name: str
    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


class Logger(Protocol):
    """Sends data to a tracker. One thread of a separate process calls all methods.

    Its constructor takes the `options` of its entry in the recipe. A method that raises is called again later with the
    same arguments, so an error costs only time.
    """

    def open(self, run: LoggedRun, identity: str) -> str:
        """Begin a run of the tracker, or continue the run of an earlier call.

        Args:
            run: Run that is logged.
            identity: Identity returned by the call that began it; empty at first.

        Returns:
            Identity of the tracker's run, kept for the next start.
        """

    def rewind(self, log: str, step: int) -> bool:  # noqa: ARG002
        """Forget the numbers of a log from a repeated step on; return whether the tracker can.

        If it cannot, as most trackers, its existing steps are not sent again.
        """
        return False

    def write(self, numbers: Sequence[Numbers]) -> None:
        """Send the numbers of some steps, at most once each, in the order of their log."""

    def write_table(self, table: LoggedTable) -> None:
        """Send rows about a step."""

    def write_file(self, path: Path) -> None:
        """Send a file of the run at its end: its report."""

    def close(self) -> None:
        """Send the rest, and end the tracker's run."""
