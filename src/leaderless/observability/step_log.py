"""Where the numbers of each step go: `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leaderless.observability.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class StepLog:
    """Written by one rank."""

    def __init__(self, directory: RunDirectory, *, enable_tensorboard: bool) -> None:
        """Nothing is written yet.

        Args:
            directory: Folder of the run.
            enable_tensorboard: Write TensorBoard events as well.
        """
        self.directory = directory
        self._writer: SummaryWriter | None = None
        self._enable_tensorboard = enable_tensorboard

    def open(self, step: int, num_roll_backs: int = 0) -> None:
        """Begin to log, or continue; what was logged from this step on is dropped.

        Args:
            step: First step that will be logged.
            num_roll_backs: Number of roll-backs of the run so far.
        """
        self.close()
        self.directory.forget_after(step - 1, num_roll_backs)
        if self._enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            with self.directory.may_fail(self.directory.tensorboard):
                # Readers of the events drop those of an earlier start that are not before this step.
                self._writer = SummaryWriter(str(self.directory.tensorboard), purge_step=step or None)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step.

        Args:
            step: Its number.
            numbers: Numbers by name.
        """
        self.directory.append_metrics({"step": step, **numbers})
        if self._writer is not None:
            with self.directory.may_fail(self.directory.tensorboard):
                for name, value in numbers.items():
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left."""
        if self._writer is not None:
            with self.directory.may_fail(self.directory.tensorboard):
                self._writer.close()
