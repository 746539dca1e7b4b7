"""The ends of a channel: one loop's output for another, sent and received while the loops continue.

A rank posts the output of an iteration and continues. A thread of the channel, the lane, sends the posts in order, each
when the ranks at the other end receive it. The lane and the receivers have process groups to themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

import torch

from leaderless.data.activity import Activity
from leaderless.data.background import Background
from leaderless.data.transport import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Note:
    """The note that goes with each iteration through a channel: a few bytes from every rank to every other.

    Attributes:
        iteration: Iteration of the source.
        is_asked_to_stop: A signal has asked some rank of either end to stop.
        is_stopping: The run stops after the training iteration of this number.
        is_checkpoint_due: A checkpoint is due after the training iteration of this number.
        is_abandoned: Some rank has not made its output, since the run stops.
    """

    iteration: int
    is_asked_to_stop: bool = False
    is_stopping: bool = False
    is_checkpoint_due: bool = False
    is_abandoned: bool = False

    def exchange(self, process_group: ProcessGroup, channel: str) -> Note:
        """Combine the notes of all ranks; a flag of one rank holds for all. All ranks of both ends call it together.

        Raises:
            RuntimeError: The ranks are not at the same iteration.
        """
        numbers = torch.tensor([-self.iteration, *map(int, astuple(self))])
        lowest, highest, *flags = process_group.max(numbers, f"channel {channel}").tolist()
        if -lowest != highest:
            raise RuntimeError(
                f"rank {process_group.rank}: channel {channel} is at iteration {-lowest} on some rank, and at "
                f"{highest} on another"
            )
        return Note(highest, *map(bool, flags))


class Outbox:
    """Posts of a rank to a channel that its lane has not sent yet; at most `capacity` iterations, in some posts each.

    Attributes:
        name: Name of the channel.
    """

    def __init__(self, name: str, capacity: int, timeout_s: float, activity: Activity) -> None:
        """Start without posts; `timeout_s` is the longest wait for the other end, recorded in `activity`."""
        self.name = name
        self._capacity, self._timeout_s, self._activity = capacity, timeout_s, activity
        self._lane = Background(f"channel {name}")
        self._under_way: deque[tuple[int, Future[None]]] = deque()

    def make_room(self) -> None:
        """Wait until there is room for another iteration in flight.

        Raises:
            RuntimeError: The other end has not come in time.
        """
        self._wait(self._capacity - 1)

    def post(self, iteration: int, send: Callable[[], None]) -> None:
        """Let the lane send an iteration, after earlier ones. An error of the lane is raised here, too."""
        self._under_way.append((iteration, self._lane.run(send)))
        self.check()

    def check(self) -> None:
        """Raise the lane's error, if it has failed."""
        while self._under_way and self._under_way[0][1].done():
            self._under_way.popleft()[1].result()

    def finish(self) -> None:
        """Wait until all posts are sent."""
        self._wait(0)

    def close(self) -> None:
        """End the lane while it waits for no rank."""
        self._lane.close()

    def _wait(self, num_left: int) -> None:
        """Wait until posts of at most some iterations are left."""
        while len({iteration for iteration, _ in self._under_way}) > num_left:
            iteration, sent = self._under_way[0]
            with self._activity.waiting(f"iteration {iteration} of channel {self.name} to be taken"):
                if not wait([sent], self._timeout_s).done:
                    raise RuntimeError(
                        f"iteration {iteration} of channel {self.name} has not been taken for {self._timeout_s:g} s: "
                        "see what the loop at its other end waits for, or raise run.timeout_s"
                    )
            self._under_way.popleft()
            sent.result()


class Inbox(Generic[T]):
    """Receives in a thread while its rank continues: one iteration at a time."""

    def __init__(self, name: str, fetch: Callable[[int], T], timeout_s: float, activity: Activity) -> None:
        """Start without receiving.

        Args:
            name: Name of what is received.
            fetch: Function that receives an iteration, in the thread.
            timeout_s: Longest wait for one.
            activity: Record of when this rank waits.
        """
        self.name = name
        self._fetch, self._timeout_s, self._activity = fetch, timeout_s, activity
        self._thread = Background(f"inbox {name}")
        self._coming: tuple[int, Future[T]] | None = None

    def begin(self, iteration: int) -> None:
        """Receive an iteration, unless that has begun; the one before must have been taken."""
        if self._coming is None:
            self._coming = iteration, self._thread.run(lambda: self._fetch(iteration))
        assert self._coming[0] == iteration, f"iteration {self._coming[0]} of {self.name} is not taken"

    def is_there(self) -> bool:
        """Whether `take` returns at once."""
        return self._coming is not None and self._coming[1].done()

    def take(self) -> T:
        """The received value, after waiting for it.

        Raises:
            RuntimeError: It has not come in time.
        """
        assert self._coming is not None, f"nothing of {self.name} is being received"
        iteration, coming = self._coming
        with self._activity.waiting(f"iteration {iteration} of {self.name}"):
            if not wait([coming], self._timeout_s).done:
                raise RuntimeError(
                    f"iteration {iteration} of {self.name} has not come for {self._timeout_s:g} s: see what the loop "
                    "that sends it waits for, or raise run.timeout_s"
                )
        self._coming = None
        return coming.result()

    def close(self) -> None:
        """End the thread while it waits for no rank."""
        self._thread.close()
