"""Work in the background, one piece after the other in the order in which it was given."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread


class Courier:
    """A thread that does what it is given, first come, first served. After a failure it does nothing more.

    All ranks give theirs the same exchanges in the same order, so that no two couriers wait for each other crosswise.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def give(self, task: Callable[[], None]) -> Future[None]:
        """Have something done later.

        Args:
            task: What.

        Returns:
            To wait for it; the error of a task is that of all behind it.
        """
        if self._thread is None:
            # When a worker fails, its process ends whatever the thread waits for.
            self._thread = Thread(target=self._work, name="courier", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._tasks.put((task, future))
        return future

    def _work(self) -> None:
        while True:
            task, future = self._tasks.get()
            try:
                if self._failure is None:
                    task()
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is waited for
                self._failure = error
            if self._failure is None:
                future.set_result(None)
            else:
                future.set_exception(self._failure)
