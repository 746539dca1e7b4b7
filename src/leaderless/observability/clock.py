"""Accounts for the time of a rank: every second of its main thread belongs to one state. Imports no torch."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Literal, TextIO, get_args

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
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        """Start now, with the thread that makes the clock."""
        self._now = now
        self.start()

    def start(self) -> None:
        """Restart with the calling thread, which must be in no state."""
        self.thread = get_ident()  # whose time is divided
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
    """Context of a state; a generator would take several times as long."""

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


PREFIX = "seconds/"
"""Beginning of the names of these metrics: `seconds/0-3/generate` is about ranks 0 to 3."""


def seconds_name(pool: str, state: str) -> str:
    """Name of the metric of a state of a pool."""
    return f"{PREFIX}{pool}/{state}"


def by_pool(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of such metrics by pool and state; states in their usual order."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        pool, _, state = name.removeprefix(PREFIX).partition("/")
        if name.startswith(PREFIX) and state in STATES:
            found.setdefault(pool, {})[state] = name
    return {pool: {state: states[state] for state in STATES if state in states} for pool, states in found.items()}


def total_seconds(rows: Iterable[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """Seconds of a whole run by pool and state, from the lines of its logs."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(PREFIX) and isinstance(value, int | float):
                totals[name] = totals.get(name, 0.0) + value
    return {pool: {state: totals[name] for state, name in states.items()} for pool, states in by_pool(totals).items()}


def seconds_left(step_s: float, step: int, num_steps: int, evaluate_every: int, evaluation_s: float) -> float:
    """Seconds after a step until the end of a run, whose steps and evaluations take so long.

    An evaluation comes after each `evaluate_every` steps, and after the last; never with 0.
    """
    num_evaluations = -(-num_steps // evaluate_every) - step // evaluate_every if evaluate_every else 0
    return step_s * (num_steps - step) + evaluation_s * num_evaluations


def in_short(seconds: Mapping[str, float]) -> str:
    """Shares of the time of a pool as a short line, the largest first; those below one percent are left out."""
    whole = sum(seconds.values()) or 1.0
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{state} {value / whole:.0%}" for state, value in largest if value >= 0.01 * whole)


HOST = "process_labels"
"""Name of the event with which each start begins in a trace: its label, which Perfetto shows, is the machine."""
MayFail = Callable[[Path], AbstractContextManager[object]]


class Tracer:
    """Times spans and, if it has a path, writes them to a file until it is closed.

    What an earlier start of the run wrote to the file is kept. All writing happens in the context `may_fail`.
    """

    def __init__(self, path: Path | None, rank: int, may_fail: MayFail = nullcontext) -> None:
        self.rank = rank
        self.seconds: dict[str, float] = {}
        self._lock = Lock()
        self._file: TextIO | None = None
        if path is not None:
            self._may_fail = partial(may_fail, path)
            with self._may_fail():
                path.parent.mkdir(parents=True, exist_ok=True)
                before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
                # The format allows the closing bracket to be missing, so a trace is readable however the run ends.
                self._file = path.open("w", encoding="utf-8")
                self._file.write("[\n" + "".join(f"{line}\n" for line in before if line.endswith("},")))
                host = {"name": HOST, "ph": "M", "pid": rank, "args": {"labels": socket.gethostname()}}
                self._file.write(json.dumps(host) + ",\n")

    @contextmanager
    def span(self, name: str, step: int, lane: int = 0) -> Iterator[dict[str, object]]:
        """Time a node or another part of a step; facts that are put into what it yields go into the trace.

        Several threads may do so at once, each in its own lane, a row of the picture; the main thread has lane 0.
        """
        facts: dict[str, object] = {"step": step}
        wall_us = time.time_ns() / 1000
        begin = time.perf_counter()
        try:
            yield facts
        finally:
            seconds = time.perf_counter() - begin
            event = {"name": name, "ph": "X", "ts": wall_us, "dur": seconds * 1e6, "pid": self.rank, "tid": lane}
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
                if self._file is not None:
                    with self._may_fail():
                        self._file.write(json.dumps({**event, "args": facts}) + ",\n")

    def take(self, name: str) -> float:
        """Seconds of one name since the last call."""
        with self._lock:
            return self.seconds.pop(name, 0.0)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        with self._lock:
            seconds, self.seconds = self.seconds, {}
            if self._file is not None:
                with self._may_fail():
                    self._file.flush()  # a process that is killed in a later step leaves this one behind
        return seconds

    def close(self) -> None:
        """End the trace; spans are still timed, but not written."""
        if self._file is not None:
            name = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
            file, self._file = self._file, None
            with self._may_fail(), file:
                file.write(json.dumps(name) + "\n]\n")
