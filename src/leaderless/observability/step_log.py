"""Where the numbers of steps go: a file of lines, and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory, finite_or_none

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class StepLog:
    """Writes the numbers of each step to `metrics.jsonl` and TensorBoard; only one rank does so.

    A log with a name has a file, and a folder of TensorBoard's events, to itself: `metrics-NAME.jsonl`.
    """

    def __init__(self, directory: RunDirectory, name: str = "", *, enable_tensorboard: bool) -> None:
        self.directory = directory
        self._lines = LineFile(directory.metrics_of(name), "step", directory.may_fail)
        self._events = directory.tensorboard / name
        self._writer: SummaryWriter | None = None
        self._enable_tensorboard = enable_tensorboard

    def open(self, step: int) -> None:
        """Begin to log, or continue, at this step; what was logged of it and of later steps is dropped."""
        self.close()
        self._lines.cut_after(step - 1)
        if self._enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with self.directory.may_fail(self.directory.tensorboard):
                # Readers of these events ignore those that an earlier start wrote from this step on.
                self._writer = SummaryWriter(str(self._events), purge_step=step or None)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._lines.append(finite_or_none({"step": step, **numbers}))
        if self._writer is not None:
            with self.directory.may_fail(self.directory.tensorboard):
                for name, value in numbers.items():
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left."""
        if self._writer is not None:
            with self.directory.may_fail(self.directory.tensorboard):
                self._writer.close()
