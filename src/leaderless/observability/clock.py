"""Accounts for the time of a rank: every second of its main thread belongs to one state. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import get_ident
from typing import Literal, get_args

State = Literal[
    "generate",
    "environment",
    "grade",
    "score",
    "train",
    "compute",
    "data",
    "move",
    "weights",
    "wait_rows",
    "wait_credit",
    "wait_weights",
    "wait_ranks",
    "wait_device",
    "evaluate",
    "checkpoint",
    "log",
    "other",
]
"""States of a rank. Time without a named state is `other`."""
STATES: tuple[State, ...] = get_args(State)


class Clock:
    """Divides the time of one thread between states, so that their seconds add up to the time that has passed.

    States nest: while an inner one lasts, the outer one gets no time. Other threads change nothing.

    Attributes:
        thread: Number of the thread whose time is divided.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Start now, with the thread that makes the clock."""
        self._now = now
        self.start()

    def start(self) -> None:
        """Restart with the calling thread, which must be in no state."""
        self.thread = get_ident()
        self._state: State = "other"
        self._seconds = dict.fromkeys(STATES, 0.0)
        self._since = self._now()

    def doing(self, state: State) -> _Doing:
        """A context in which time belongs to a state."""
        return _Doing(self, state)

    def take(self) -> dict[State, float]:
        """Seconds of every state since the last call; they add up to the time between the calls."""
        self.switch(self._state)
        seconds, self._seconds = self._seconds, dict.fromkeys(STATES, 0.0)
        return seconds

    def switch(self, state: State) -> State:
        """Switch to another state; returns the previous one. Only the clock's thread may call it."""
        now = self._now()
        before = self._state
        self._seconds[before] += now - self._since
        self._since, self._state = now, state
        return before


class _Doing:
    """See `Clock.doing`. A generator would take several times as long."""

    __slots__ = ("_before", "_clock", "_state")

    def __init__(self, clock: Clock, state: State) -> None:
        self._clock, self._state = clock, state
        self._before: State | None = None

    def __enter__(self) -> None:
        if get_ident() == self._clock.thread:
            self._before = self._clock.switch(self._state)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            self._clock.switch(self._before)
