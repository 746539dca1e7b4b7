"""The sending end of a channel: what one loop has made for another, sent while the loop goes on.

A rank posts what it has made in an iteration and continues. A thread of the channel, the lane, sends the posts in
order: each when the ranks at the other end come for it. The lane and the receivers have process groups to themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass

import torch

from leaderless.data.activity import Activity
from leaderless.data.background import Background
from leaderless.data.transport import ProcessGroup


@dataclass(frozen=True)
class Note:
    """What goes with each iteration through a channel: a few bytes from every rank to every other.

    Attributes:
        iteration: Iteration of the source.
        is_asked_to_stop: A signal has asked some rank of either end to stop.
        is_stopping: The run stops after the training iteration of this number.
        is_checkpoint_due: A checkpoint is due after the training iteration of this number.
    """

    iteration: int
    is_asked_to_stop: bool = False
    is_stopping: bool = False
    is_checkpoint_due: bool = False

    def exchange(self, process_group: ProcessGroup, channel: str) -> Note:
        """Combine the notes of all ranks; what one says holds for all. All ranks of both ends call it together.

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
    """What a rank has posted to a channel and its lane has not sent yet; at most `capacity` iterations.

    Attributes:
        name: Name of the channel.
    """

    def __init__(self, name: str, capacity: int, timeout_s: float, activity: Activity) -> None:
        """Nothing is posted yet; `timeout_s` is the longest wait for the other end, with `activity` as its record."""
        self.name = name
        self._capacity, self._timeout_s, self._activity = capacity, timeout_s, activity
        self._lane = Background(f"channel {name}")
        self._under_way: deque[tuple[int, Future[None]]] = deque()

    def make_room(self) -> None:
        """Wait until another iteration may be begun, as one more may be in flight.

        Raises:
            RuntimeError: The other end has not come in time.
        """
        self._wait(self._capacity - 1)

    def post(self, iteration: int, send: Callable[[], None]) -> None:
        """Let the lane send an iteration, after those before it. What the lane failed at is raised here, too."""
        self._under_way.append((iteration, self._lane.run(send)))
        while self._under_way[0][1].done():
            self._under_way.popleft()[1].result()
            if not self._under_way:
                break

    def finish(self) -> None:
        """Wait until all is sent."""
        self._wait(0)

    def close(self) -> None:
        """End the lane, where it waits for nobody."""
        self._lane.close()

    def _wait(self, num_left: int) -> None:
        while len(self._under_way) > num_left:
            iteration, sent = self._under_way[0]
            with self._activity.waiting(f"iteration {iteration} of channel {self.name} to be taken"):
                if not wait([sent], self._timeout_s).done:
                    raise RuntimeError(
                        f"iteration {iteration} of channel {self.name} has not been taken for {self._timeout_s:g} s: "
                        "see what the loop at its other end waits for, or raise run.timeout_s"
                    )
            self._under_way.popleft()
            sent.result()
