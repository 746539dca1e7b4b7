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
        shown: Description of the work for people, and how much of it is done.
        part: Part of that work that is done now.
        waiting_for: Name of the operation for which this rank waits for others; empty if it does not wait.
        moved_at: Time of the last sign of life, in seconds of the monotonic clock.
    """

    step: int = 0
    place: int = 0
    doing: str = "the start"
    shown: str = "starting"
    part: str = ""
    waiting_for: str = ""
    moved_at: float = field(default_factory=time.monotonic)

    def begin(self, step: int, doing: str, place: int) -> None:
        """Start an entry of the chain, by its name and its position in the schedule."""
        self.step, self.doing, self.place = step, doing, place
        self.show(f"step {step}: {doing}")

    def show(self, what: str, done: float | str = "") -> None:
        """Describe to people what is done now, and how much of it, as text or a fraction; a sign of life, too."""
        self.shown, self.part = f"{what} {done if isinstance(done, str) else f'{done:.0%}'}".rstrip(), ""
        self.beat()

    def beat(self) -> None:
        """Record progress: a micro-batch, a token of each response, a reward."""
        self.moved_at = time.monotonic()

    def advance(self, part: str) -> None:
        """Record progress, and which part of the work is done now."""
        self.part = part
        self.beat()

    def __str__(self) -> str:
        """Describe what is done now, and what this rank waits for."""
        return f"{self.shown}{self.part}{f', waiting for {self.waiting_for}' if self.waiting_for else ''}"

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Record a wait for other ranks in the named operation."""
        before, self.waiting_for = self.waiting_for, what
        try:
            yield
        finally:
            self.waiting_for = before
            self.beat()
