"""Counts of requests between two reports."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_LATENCIES = 1 << 16
"""Requests whose latencies are kept until the next report, the newest ones."""


@dataclass
class Counts:
    """Numbers since the last report; requests in progress then count in the next one.

    Attributes:
        requests: Requests for responses.
        failed: Requests that were answered with an error of the server.
        without_feedback: Responses that were dropped because no feedback came.
        stale: Responses that were dropped because they were too old.
        interrupted: Responses that weights of several versions have sampled.
        latencies_s: Seconds from request to reply, where the rank did nothing but sample.
        latencies_training_s: Seconds from request to reply, where the rank did something else meanwhile.
    """

    requests: int = 0
    failed: int = 0
    without_feedback: int = 0
    stale: int = 0
    interrupted: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    latencies_training_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LATENCIES))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, number: int = 1) -> None:
        """Add to one of the numbers."""
        with self._lock:
            setattr(self, name, getattr(self, name) + number)

    def replied(self, seconds: float, *, is_crossed: bool) -> None:
        """Add the time that a request took, and whether the rank did something else in it."""
        with self._lock:
            (self.latencies_training_s if is_crossed else self.latencies_s).append(seconds)

    def take(self) -> Counts:
        """Counts since the last call; counting begins anew."""
        with self._lock:
            taken = Counts(
                self.requests,
                self.failed,
                self.without_feedback,
                self.stale,
                self.interrupted,
                self.latencies_s,
                self.latencies_training_s,
            )
            self.requests = self.failed = self.without_feedback = self.stale = self.interrupted = 0
            self.latencies_s, self.latencies_training_s = deque(maxlen=MAX_LATENCIES), deque(maxlen=MAX_LATENCIES)
            return taken


def percentile_95(values: Iterable[float]) -> float:
    """The smallest value that at least 95 % of the values do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1] if ordered else 0.0
