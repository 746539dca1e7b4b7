"""Decides whether failed workers are restarted, and reports why."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from leaderless.observability.run_directory import RunDirectory
from leaderless.worker.supervision.failure import FINAL, STEPS_BEGUN, WorkerFailure, first_failure, read_place

SAME_FAILURES = 3
"""Number of failures of one kind at one step that ends a run: another start would only repeat them."""
SAME_ERRORS = 2
"""The same for Python exceptions, which come from the program: each start computes the same."""


class Restarts:
    """Counts the failures of a run since its last progress: a new checkpoint."""

    def __init__(self, directory: RunDirectory, max_restarts: int, say: Callable[[str], None]) -> None:
        self.failure: WorkerFailure | None = None  # that ended the run
        self.say = say
        self._directory, self._max_restarts = directory, max_restarts
        self._saved = directory.last_step()
        self._first_step = self._reached()
        self._num = 0
        self._seen: Counter[tuple[str, int]] = Counter()
        self._failed_at: float | None = None

    def failed(self, codes: Mapping[int, int], folder: Path, *, is_stopping: bool) -> bool:
        """Record a failure of workers, which may have been asked to stop, and decide whether they are restarted.

        The exit codes, by rank, are of those that ended first; negative after a signal. The folder has their failures.
        """
        written = first_failure(folder)
        failure = _first_cause(codes, written, folder, self._directory.logs)
        if is_stopping:
            # Then a rank is interrupted, or loses interrupted peers: that is no failure.
            is_news = written is not None and written.kind not in {"interrupt", "lost_peers"}
            self.failure = failure if is_news else None
            return False
        why_not = self._why_not(failure, has_begun=(folder / STEPS_BEGUN).exists())
        if why_not is None:
            return True
        self.failure = replace(failure, message=f"{failure.message}; {why_not}") if why_not else failure
        return False

    def begun(self) -> None:
        """Record that workers reached their first step, perhaps again."""
        if self._failed_at is not None:
            seconds, self._failed_at = time.monotonic() - self._failed_at, None
            self._directory.append_event("resumed", {"from_step": self._saved, "seconds": round(seconds, 3)})
            self.say(f"back at work {seconds:.1f} s after the failure")

    def _why_not(self, failure: WorkerFailure, *, has_begun: bool) -> str | None:
        """Why workers must not be restarted, empty if there is nothing to explain; None if they may be."""
        saved, reached = self._directory.last_step(), self._reached()
        if saved > self._saved:
            self._saved, self._num = saved, 0
            self._seen.clear()
        self._seen[failure.place, reached] += 1
        if failure.kind in FINAL or self._max_restarts == 0:
            return ""
        if failure.kind in {"error", "outside", "storage"} and not has_begun and self._failed_at is None:
            return "it came up before the first step, so that another start would not help"
        if failure.kind == "error" and reached == self._first_step and self._failed_at is None:
            return "it came up in the first step, so that another start would not help"
        times = self._seen[failure.place, reached]
        if times == (SAME_ERRORS if failure.kind == "error" else SAME_FAILURES):
            return f"it has come up {times} times after step {reached}, with no new checkpoint in between"
        if self._num == self._max_restarts:
            return f"run.max_restarts={self._max_restarts} restarts have led to no new checkpoint"
        self._num += 1
        self._failed_at = time.monotonic()
        self._report(failure, saved, max(0, reached - saved))
        return None

    def _reached(self) -> int:
        return max((int(record["step"]) for record in self._directory.read_metrics()), default=0)

    def _report(self, failure: WorkerFailure, saved: int, lost: int) -> None:
        self._directory.append_event(
            "restart", {"rank": failure.rank, "cause": failure.message, "from_step": saved, "lost_steps": lost}
        )
        where = f"the checkpoint of step {saved}" if saved else "the beginning, as there is no checkpoint yet"
        steps = f"; {lost} step{'s' if lost > 1 else ''} will be done again" if lost else ""
        self.say(f"{failure.message}: starting again from {where}{steps} (restart {self._num} of {self._max_restarts})")


def _first_cause(codes: Mapping[int, int], failure: WorkerFailure | None, folder: Path, logs: Path) -> WorkerFailure:
    """Why workers failed: the report of one of them, or how it ended."""
    if failure is not None and failure.kind in {"recipe", "stall"}:
        return failure
    others = f"; the output of all ranks but the first is in {logs}" if any(logs.glob("*")) else ""
    killed = next((rank for rank, code in codes.items() if code < 0), None)
    if killed is not None and (failure is None or failure.kind == "lost_peers"):
        message = f"rank {killed} was ended by {_death(codes[killed], read_place(folder, killed))}{others}"
        return WorkerFailure(killed, "killed", message)
    if failure is not None:
        how = "has lost its peers" if failure.kind == "lost_peers" else "failed"
        return replace(failure, message=f"rank {failure.rank} {how}: {failure.message}")
    message = ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in codes.items()) + others
    return WorkerFailure(min(codes), "killed", message)


def _death(code: int, place: tuple[int, str] | None) -> str:
    """The signal that ended a worker, where, and what to do about it."""
    name = signal.Signals(-code).name
    where = f" at step {place[0]}, in {place[1]}" if place else " before the first step"
    if name != "SIGKILL":
        return name + where
    remedy = "lower batch.micro_batch_tokens or rollout.max_sequences, or use more ranks"
    if place is not None and place[1] == "checkpoint":
        remedy = "set checkpoint.asynchronous=false, which takes no copy of the state, or use more ranks"
    return f"{name}{where}, as the system does when memory runs out: {remedy}"
