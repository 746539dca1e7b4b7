"""Who computes next: the client that has used the device least, for one pass or one token of each response.

    requests of client A -> lanes of A (adapters to train, samplers) --+
                                                                       +-> fair queue -> one thread -> results
    requests of client B -> lanes of B --------------------------------+

Requests of a lane are carried out in their order, and those of several lanes side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Protocol

from leaderless.base.values import Json
from leaderless.distributed.errors import is_out_of_memory

Result = Json | bytes
"""JSON, or a message of protocol buffers."""
Work = Generator[None, None, Result]
"""Work on a request, a pass for each `next`."""


@dataclass(frozen=True)
class Failure:
    """Reason for a request that was not carried out.

    Attributes:
        message: Rule that is broken, and remedy.
        is_users: Whether the client has to change the request.
    """

    message: str
    is_users: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure that an error is; a ValueError is about the request."""
        if is_out_of_memory(error):
            text = "out of memory: send shorter sequences, or start the server with a lower --pass-tokens"
            return cls(text, is_users=False)
        if isinstance(error, ValueError):
            return cls(str(error), is_users=True)
        return cls(f"the server has failed: {type(error).__name__}: {error}", is_users=False)


@dataclass(eq=False)
class Promise:
    """The result of a request, which its client collects.

    Attributes:
        request_id: Name of the request.
        digest: Digest of its content, to know it from another request with the same name.
        tell: Function that is called, in any thread, when the result is there.
        outcome: The result, or the reason why there is none; None before the end.
    """

    request_id: str
    digest: str
    tell: Callable[[], None]
    outcome: Result | Failure | None = None

    def settle(self, outcome: Result | Failure) -> None:
        """Set the outcome, once."""
        if self.outcome is None:
            self.outcome = outcome
            self.tell()


class Lane(Protocol):
    """Requests of a client that are carried out in their order."""

    def is_ready(self) -> bool:
        """Whether there is something to compute now."""

    def advance(self) -> None:
        """Compute one pass; errors go to the requests."""

    def end(self, failure: Failure) -> None:
        """Settle all requests, now and later, with a failure, and release memory."""


@dataclass
class TrainLane:
    """Requests for the same adapters, by number; one whose number is not due waits for those before it.

    Attributes:
        next_seq: Number of the request that is carried out next.
    """

    next_seq: int = 1
    _waiting: dict[int, tuple[Promise, Callable[[], Work]]] = field(default_factory=dict)
    _current: tuple[Promise, Work] | None = None
    _failure: Failure | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not ended."""
        return len(self._waiting) + (self._current is not None)

    def push(self, seq: int, promise: Promise, work: Callable[[], Work]) -> None:
        """Add a request."""
        if self._failure is not None:
            promise.settle(self._failure)
            return
        self._waiting[seq] = promise, work

    def is_ready(self) -> bool:
        """Whether a request is being carried out, or due."""
        return self._current is not None or self.next_seq in self._waiting

    def advance(self) -> None:
        """Carry out a pass of the request that is due."""
        if self._current is None:
            promise, begin = self._waiting.pop(self.next_seq)
            self._current = promise, begin()
        promise, work = self._current
        try:
            next(work)
        except StopIteration as end:
            self._finish(end.value)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets it, and others go on
            self._finish(Failure.of(error))

    def _finish(self, outcome: Result | Failure) -> None:
        assert self._current is not None
        promise, _ = self._current
        self._current = None
        self.next_seq += 1
        promise.settle(outcome)

    def end(self, failure: Failure) -> None:
        """Settle all requests with a failure."""
        self._failure = failure
        if self._current is not None:
            self._current[1].close()
            self._current[0].settle(failure)
            self._current = None
        for promise, _ in self._waiting.values():
            promise.settle(failure)
        self._waiting.clear()


@dataclass
class _Client:
    """What a client has asked for, and how long it has computed."""

    used_s: float
    lanes: list[Lane] = field(default_factory=list)


class FairQueue:
    """Lanes of several clients, which take turns on one device.

    The client that has used the least time comes next, and its lanes one after the other. One that comes, or comes back
    after it had nothing to do, begins with as much as the least of the busy ones, so that nobody saves up time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._busy: set[str] = set()
        self._orders: list[Callable[[], None]] = []
        self.changed = threading.Condition()
        """Notified whenever there may be something to do."""

    def order(self, change: Callable[[], None]) -> None:
        """Have the thread that computes make a change between two turns."""
        with self.changed:
            self._orders.append(change)
            self.changed.notify()

    def add(self, client: str, lane: Lane) -> None:
        """Add a lane of a client; for the thread that computes."""
        self._clients.setdefault(client, _Client(self._least())).lanes.append(lane)

    def remove(self, client: str, lane: Lane) -> None:
        """Remove a lane; for the thread that computes."""
        found = self._clients.get(client)
        if found is not None and lane in found.lanes:
            found.lanes.remove(lane)
            if not found.lanes:
                del self._clients[client]

    def _least(self) -> float:
        return min((self._clients[one].used_s for one in self._busy if one in self._clients), default=0.0)

    def turn(self) -> bool:
        """Make changes, and let one lane compute a pass; returns whether there was anything to compute."""
        with self.changed:
            orders, self._orders = self._orders, []
        for change in orders:
            change()
        ready = {name: one for name, one in self._clients.items() if any(lane.is_ready() for lane in one.lanes)}
        least = self._least()
        for name in ready.keys() - self._busy:
            ready[name].used_s = max(ready[name].used_s, least)
        self._busy = {*ready}
        if not ready:
            return False
        client = min(ready.values(), key=lambda one: one.used_s)
        place = next(place for place, lane in enumerate(client.lanes) if lane.is_ready())
        lane = client.lanes.pop(place)
        client.lanes.append(lane)  # the others of the client come first next time
        begin = self._clock()
        lane.advance()
        client.used_s += self._clock() - begin
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until there may be something to do."""
        with self.changed:
            if not self._orders:
                self.changed.wait(timeout_s)

    def used_s(self) -> dict[str, float]:
        """Seconds that each client has computed, or was given when it came."""
        return {name: one.used_s for name, one in self._clients.items()}
