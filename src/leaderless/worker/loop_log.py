"""The log of a loop, which its first rank writes."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.observability.run_directory import RunDirectory
from leaderless.observability.step_log import StepLog
from leaderless.planner import Loop
from leaderless.worker.parts import Progress


class LoopLog:
    """Writes the numbers of a loop's iterations, and of evaluations on its ranks.

    The loop that trains has one line for a step with all its numbers. A loop that is ahead evaluates the weights of an
    earlier step than the iteration that it is at, so that it has a file for either.
    """

    def __init__(self, directory: RunDirectory, loop: Loop, *, enable_tensorboard: bool) -> None:
        """Nothing is written yet."""
        self._directory, self._is_ahead = directory, loop.lag > 0
        self._iterations = StepLog(directory, loop.name if loop.lag else "", enable_tensorboard=enable_tensorboard)
        self._evaluations = self._iterations
        if loop.lag:
            self._evaluations = StepLog(directory, "evaluation", enable_tensorboard=enable_tensorboard)

    def open(self, progress: Progress, num_roll_backs: int) -> None:
        """Continue after the last iteration. What was written before the first one is written again."""
        self._iterations.open(progress.step + 1 if progress.step else 0)
        if self._is_ahead:
            self._evaluations.open(progress.trained + 1 if progress.trained else 0)
        else:
            self._directory.forget_events(progress.step or -1, num_roll_backs)
            self._directory.forget_samples(progress.step or -1)

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an iteration."""
        self._iterations.write(iteration, numbers)

    def write_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log what was measured after a step of training."""
        self._evaluations.write(step, numbers)

    def close(self) -> None:
        """Write out what is left."""
        self._iterations.close()
        self._evaluations.close()
