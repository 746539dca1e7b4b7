"""Activity of a rank, and the time of its last sign of life. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Activity:
    """Written by the main thread of a worker, and read by the thread that watches it; a beat costs next to nothing.

    Attributes:
        step: Step of the run.
        place: Position of the chain's entry in the whole schedule, which shows the rank that is furthest behind.
        doing: Name of that entry.
        waiting_for: Name of the operation for which this rank waits for others; empty if it does not wait.
        moved_at: Time of the last sign of life, in seconds of the monotonic clock.
    """

    step: int = 0
    place: int = 0
    doing: str = "the start"
    waiting_for: str = ""
    moved_at: float = field(default_factory=time.monotonic)

    def begin(self, step: int, doing: str, place: int) -> None:
        """Start an entry of the chain, by its name and its position in the schedule."""
        self.step, self.doing, self.place = step, doing, place
        self.beat()

    def beat(self) -> None:
        """Record progress: a micro-batch, a token of each response, a reward."""
        self.moved_at = time.monotonic()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Record a wait for other ranks in the named operation."""
        before, self.waiting_for = self.waiting_for, what
        try:
            yield
        finally:
            self.waiting_for = before
            self.beat()
