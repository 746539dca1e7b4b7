"""A thread that runs tasks next to the main one, and results that it makes before they are needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

CLOSE_S = 2.0
"""Longest wait for the thread to end: a process does not wait for a step that takes minutes to read."""

T = TypeVar("T")


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
            pass  # the task is freed during the wait for the next one

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
        if not wait([self._coming[0]], self._timeout_s).done:
            raise RuntimeError(
                f"{self._background.name} has waited {self._timeout_s:g} s for data: see whether the disk or the hub "
                "answers; where a long stream is read up to where the run was, raise run.timeout_s"
            )
        made = self._coming[0].result()
        self._coming.popleft()
        return made

    def close(self) -> None:
        """End the thread after its current call; results made ahead are dropped."""
        self._is_closed = True
        for future in self._coming:
            future.cancel()
        self._coming.clear()
        self._background.close()
