"""The log of a loop, which its first rank writes."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.observability.run_directory import RunDirectory
from leaderless.observability.step_log import StepLog
from leaderless.planner import Loop, Plan
from leaderless.worker.build.parts import Progress


class LoopLog:
    """Writes the numbers of a loop's iterations, and of evaluations on its ranks.

    The loop that trains has one line for a step with all its numbers. A loop that is ahead evaluates the weights of an
    earlier step than the iteration that it is at, so that it has a file for either.
    """

    def __init__(self, directory: RunDirectory, plan: Plan, loop: Loop) -> None:
        self._directory, self._plan, self._loop = directory, plan, loop
        self._iterations = StepLog(directory, loop.name if loop.lag else "")
        self._evaluations = self._iterations
        if loop.lag:
            self._evaluations = StepLog(directory, "evaluation")

    def open(self, progress: Progress, num_roll_backs: int) -> None:
        """Continue after the last iteration. What was written before the first one is written again."""
        self.open_files(progress)
        if not self._loop.lag:
            lags = {node: loop.lag for loop in self._plan.loops for node in loop.nodes}
            self._directory.forget_events(lambda node: (progress.step or -1) + lags.get(node, 0), num_roll_backs)
        self._directory.forget_samples(progress.step or -1, progress.trained or -1, self._is_own)

    def open_files(self, progress: Progress) -> None:
        """Continue the files of the log after the last iteration."""
        self._iterations.open(progress.step + 1 if progress.step else 0)
        if self._loop.lag:
            self._evaluations.open(progress.trained + 1 if progress.trained else 0)

    def _is_own(self, rank: int) -> bool:
        """Whether a rank is in this loop; the one that trains also takes those that there are no more."""
        loop = next((loop for loop in self._plan.loops if rank in loop.ranks), self._plan.leading)
        return loop.name == self._loop.name

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of an iteration."""
        self._iterations.write(iteration, numbers)

    def write_evaluation(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log what was measured after a step of training."""
        self._evaluations.write(step, numbers)
