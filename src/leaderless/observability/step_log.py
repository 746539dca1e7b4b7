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
        """Open the log.

        Args:
            directory: Of the run.
            enable_tensorboard: Write TensorBoard events as well.
        """
        self.directory = directory
        self._writer: SummaryWriter | None = None
        if enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory.tensorboard))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step.

        Args:
            step: Its number.
            numbers: By name.
        """
        self.directory.append_metrics({"step": step, **numbers})
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out what is left."""
        if self._writer is not None:
            self._writer.close()
