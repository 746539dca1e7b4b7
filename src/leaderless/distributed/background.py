"""Threads next to the main one: they run tasks, make results before they are needed, and send and receive."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from leaderless.distributed.activity import Activity

CLOSE_S = 2.0
"""Longest wait for the thread to end: a process does not wait for a step that takes minutes to read."""

T = TypeVar("T")


def result_of(future: Future[T], timeout_s: float, problem: str) -> T:
    """The result of a task, within a time limit; else a RuntimeError with the problem."""
    if not wait([future], timeout_s).done:
        raise RuntimeError(problem)
    return future.result()


class Background:
    """A thread that runs tasks in the order they were given. After a failure it runs no more tasks.

    The thread starts with the first task. When a worker fails, its process ends no matter what the thread waits for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._failure: BaseException | None = None

    def run(self, task: Callable[[], T]) -> Future[T]:
        """Run a task later. If it fails, all later tasks fail with its error."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put((task, future))
        return future

    def run_here(self, task: Callable[[], T]) -> T:
        """Run a task at once, without the thread. If it fails, all later tasks fail with its error."""
        future: Future[T] = Future()
        self._has_run((task, future))
        return future.result()

    def close(self) -> None:
        """End the thread after the tasks it was given."""
        if self._thread.ident is not None:
            self._tasks.put(None)
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while self._has_run(self._tasks.get()):
            pass

    def _has_run(self, given: tuple[Callable[[], Any], Future[Any]] | None) -> bool:
        if given is None:
            return False
        task, future = given
        if not future.set_running_or_notify_cancel():
            return True
        try:
            result = task() if self._failure is None else None
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            self._failure = error
        # Memory of the task, such as a copy of weights, is free before anyone learns that it has ended.
        del task, given
        if self._failure is None:
            future.set_result(result)
        else:
            future.set_exception(self._failure)
        return True


class ReadAhead(Generic[T]):
    """Calls a function repeatedly in a thread, and hands out its results in order."""

    def __init__(self, make: Callable[[], T], num_ahead: int, name: str, timeout_s: float) -> None:
        """Wrap a function; with 0 results made ahead, `next` calls it directly, without a thread."""
        self._make, self._num_ahead, self._timeout_s = make, num_ahead, timeout_s
        self._background = Background(name)
        self._coming: deque[Future[T]] = deque()
        self._is_closed = False

    def next(self) -> T:
        """The next result, within the time limit; an error is raised in its turn, and again by every later call."""
        assert not self._is_closed, f"{self._background.name} is closed"
        if not self._num_ahead:
            return self._background.run_here(self._make)
        while len(self._coming) <= self._num_ahead:
            self._coming.append(self._background.run(self._make))
        made = result_of(
            self._coming[0],
            self._timeout_s,
            f"{self._background.name} has waited {self._timeout_s:g} s for data: see whether the disk or the hub "
            "answers; where a long stream is read up to where the run was, raise run.timeout_s",
        )
        self._coming.popleft()
        return made

    def close(self) -> None:
        """End the thread after its current call; results made ahead are dropped."""
        self._is_closed = True
        for future in self._coming:
            future.cancel()
        self._coming.clear()
        self._background.close()


class Outbox:
    """Posts of a rank to a channel that its lane has not sent yet; at most `capacity` iterations, in some posts each.

    Attributes:
        name: Name of the channel.
    """

    def __init__(self, name: str, capacity: int, timeout_s: float, activity: Activity) -> None:
        """Wait for the other end at most `timeout_s`, which is recorded in `activity`."""
        self.name = name
        self._capacity, self._timeout_s, self._activity = capacity, timeout_s, activity
        self._lane = Background(f"channel {name}")
        self._under_way: deque[tuple[int, Future[Any]]] = deque()

    def make_room(self) -> None:
        """Wait until there is room for another iteration in flight.

        Raises:
            RuntimeError: The other end has not come in time.
        """
        self._wait(self._capacity - 1)

    def post(self, iteration: int, send: Callable[[], object]) -> None:
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
                result_of(
                    sent,
                    self._timeout_s,
                    f"iteration {iteration} of channel {self.name} has not been taken for {self._timeout_s:g} s: "
                    "see what the loop at its other end waits for, or raise run.timeout_s",
                )
            self._under_way.popleft()


class Inbox(Generic[T]):
    """Receives in a thread while its rank continues: one iteration at a time.

    Args:
        name: Name of what is received.
        fetch: Function that receives an iteration, in the thread.
        timeout_s: Longest wait for one.
        activity: Record of when this rank waits.
    """

    def __init__(self, name: str, fetch: Callable[[int], T], timeout_s: float, activity: Activity) -> None:
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
            taken = result_of(
                coming,
                self._timeout_s,
                f"iteration {iteration} of {self.name} has not come for {self._timeout_s:g} s: see what the loop "
                "that sends it waits for, or raise run.timeout_s",
            )
        self._coming = None
        return taken

    def close(self) -> None:
        """End the thread while it waits for no rank."""
        self._thread.close()
