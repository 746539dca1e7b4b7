"""An event loop in a thread of its own, for connections that outlive the loops that play episodes. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


class LoopThread:
    """A loop that continues while the loops of episodes are busy, as with an engine."""

    def __init__(self, name: str) -> None:
        """Start the thread, which keeps no process alive."""
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[object, object, Result]) -> Future[Result]:
        """Begin a coroutine in the thread; canceling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[object, object, Result]) -> Result:
        """The result of a coroutine in the thread, for another loop."""
        return await asyncio.wrap_future(self.start(work))

    def stop(self, timeout_s: float) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
