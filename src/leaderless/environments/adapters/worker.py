"""A process that answers questions of many episodes, for packages that live in another Python. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from threading import Lock, Thread
from weakref import finalize

from leaderless.base.exits import exit_in_words
from leaderless.base.values import Json
from leaderless.environments.guarded_environment import CRASH, EnvironmentFailure

_LEAVING_S = 2.0
"""Seconds that the process has to end by itself once its input has ended."""


def shared(command: Sequence[str]) -> PackageWorker:
    """The worker of a command, which all episodes of this process share; a new one if it has ended.

    Args:
        command: Program and arguments.
    """
    worker = _SHARED.get(tuple(command))
    if worker is None or worker.has_ended:
        worker = _SHARED[tuple(command)] = PackageWorker(command)
    return worker


class PackageWorker:
    """A process to which questions are written as lines of JSON with a `number`, and which answers in any order.

    It may be asked from one event loop after the other, and ends with this object. An answer with `fatal` says why it
    is about to end.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start the process.

        Args:
            command: Program and arguments.
        """
        self._process = subprocess.Popen(  # noqa: S603 - the recipe's own program
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            bufsize=1,
            start_new_session=True,
        )
        self._numbers, self._answers = count(), _Answers()
        finalize(self, _stop, self._process)
        Thread(target=self._answers.read, args=(self._process,), name="worker answers", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether it answers no more."""
        return self._answers.end is not None

    async def ask(self, question: Mapping[str, Json]) -> Mapping[str, Json]:
        """The answer to a question. Who gives up waiting cancels it.

        Raises:
            Failure: The process has ended.
        """
        number = next(self._numbers)
        answer = self._answers.expect(number)
        try:
            self._write({"number": number, **question})
            return await answer
        except asyncio.CancelledError:
            self._write({"number": next(self._numbers), "cancel": number})
            raise
        finally:
            self._answers.forget(number)

    def _write(self, question: Mapping[str, Json]) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, which whoever waits for an answer learns
            self._process.stdin.write(json.dumps(question) + "\n")


_SHARED: dict[tuple[str, ...], PackageWorker] = {}


class _Answers:
    """Who waits for which answer. A thread reads them, which does not keep the worker alive.

    Attributes:
        end: Reason why there are no more; None while there are.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Mapping[str, Json]]] = {}
        self._lock = Lock()
        self.end: str | None = None

    def expect(self, number: int) -> asyncio.Future[Mapping[str, Json]]:
        """The answer of a number, once it is there."""
        future: asyncio.Future[Mapping[str, Json]] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.end is not None:
                raise EnvironmentFailure(CRASH, self.end)
            self._waiting[number] = future
        return future

    def forget(self, number: int) -> None:
        """Wait for an answer no longer."""
        with self._lock:
            self._waiting.pop(number, None)

    def read(self, process: subprocess.Popen[str]) -> None:
        """Give each answer to whoever waits for it, and in the end the reason why there are no more."""
        reason = "its output above may say why"
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            reason = answer.get("fatal", reason)
            with self._lock:
                future = self._waiting.get(answer.get("number", -1))
            if future is not None:
                _settle(future, answer)
        code = process.wait()
        with self._lock:
            self.end = f"the process ended with {exit_in_words(code)}: {reason}"
            left = list(self._waiting.values())
        for future in left:
            _settle(future, EnvironmentFailure(CRASH, self.end))


def _settle(future: asyncio.Future[Mapping[str, Json]], found: Mapping[str, Json] | EnvironmentFailure) -> None:
    """End a future of another thread's event loop, if both are still there."""

    def settle() -> None:
        if not future.done():
            future.set_exception(found) if isinstance(found, EnvironmentFailure) else future.set_result(found)

    with suppress(RuntimeError):  # the loop is closed
        future.get_loop().call_soon_threadsafe(settle)


def _stop(process: subprocess.Popen[str]) -> None:
    """End a process, and what it has started."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVING_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
