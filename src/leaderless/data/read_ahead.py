"""Makes results before they are needed, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

POLL_S = 0.1
"""Time after which a thread that waits for room checks whether it is to end."""

CLOSE_S = 2.0
"""Longest wait for the thread to end: a process does not stay for a step that takes minutes to read."""

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Calls a function again and again in a thread, and hands out what it returns in order.

    The thread is begun when the first result is asked for. It never keeps a process from ending.
    """

    def __init__(self, make: Callable[[], T], num_ahead: int, name: str, timeout_s: float) -> None:
        """Take a function.

        Args:
            make: Function, called by one thread at a time.
            num_ahead: Number of results made ahead; 0 makes each one when it is asked for, without a thread.
            name: Name of the thread, for people.
            timeout_s: Longest wait for a result.
        """
        self._make, self._num_ahead, self._timeout_s = make, num_ahead, timeout_s
        self._made: queue.Queue[T | _Failed] = queue.Queue()
        self._room = threading.Semaphore(num_ahead)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._failed: _Failed | None = None

    def next(self) -> T:
        """The next result; an error of the function is raised here, in its turn, and again at every later call.

        Raises:
            RuntimeError: It takes too long.
        """
        assert not self._is_closed.is_set(), f"{self._thread.name} is closed"
        if not self._num_ahead:
            return self._make()
        if self._thread.ident is None:
            self._thread.start()
        if self._failed is None:
            try:
                made = self._made.get(timeout=self._timeout_s)
            except queue.Empty as error:
                raise RuntimeError(
                    f"{self._thread.name} has waited {self._timeout_s:g} s for data: see whether the disk or the hub "
                    "answers; where a long stream is read up to where the run was, raise run.timeout_s"
                ) from error
            if not isinstance(made, _Failed):
                self._room.release()
                return made
            self._failed = made
        raise self._failed.error

    def close(self) -> None:
        """End the thread, when it has made what it is making; what it has made ahead is dropped."""
        self._is_closed.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if not self._room.acquire(timeout=POLL_S):
                continue
            try:
                self._made.put(self._make())
            except BaseException as error:  # noqa: BLE001  (raised by `next`)
                self._made.put(_Failed(error))
                return


class _Failed:
    """What went wrong in the thread."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
