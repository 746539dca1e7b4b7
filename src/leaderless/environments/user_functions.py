"""Users' functions: in threads that never keep the process from ending, and with time limits that they may overrun.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Thread
from typing import Any, TextIO, TypeVar, cast

_is_users: ContextVar[bool] = ContextVar("is_users", default=False)


async def call_user(function: Callable[[], object], name: str) -> object:
    """Call a user's function: awaited if it is `async`, else in a daemon thread.

    What it prints goes to standard error. If whoever waits gives up, a thread runs on by itself, and its result is
    dropped. A child that the function forks off ends where the function returns.

    Raises:
        RuntimeError: The function has called `sys.exit`, or ended in another way that is not an error.
    """
    if not isinstance(sys.stdout, _Prints):
        sys.stdout = cast("TextIO", _Prints(sys.stdout))
    token = _is_users.set(True)
    try:
        result = function() if inspect.iscoroutinefunction(function) else await _in_thread(function, name)
        return await _awaited(result) if inspect.isawaitable(result) else result
    finally:
        _is_users.reset(token)


async def _awaited(result: Awaitable[object]) -> object:
    process = os.getpid()
    try:
        return await result
    except SystemExit as error:
        raise _as_error(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _as_error(error) from error  # of a task of the user's, whose end does not end whoever waits here
    finally:
        _end_fork(process)


async def _in_thread(function: Callable[[], object], name: str) -> object:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()
    context, process = copy_context(), os.getpid()

    def work() -> None:
        try:
            settle = partial(future.set_result, context.run(function))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
            settle = partial(future.set_exception, _as_error(error))
        _end_fork(process)
        with suppress(RuntimeError):  # the loop has ended, and nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else settle())

    Thread(target=work, name=name, daemon=True).start()
    return await future


def _end_fork(process: int) -> None:
    """End the process if a user's function has returned in a child that it forked off."""
    if os.getpid() != process:
        os._exit(0)


def _as_error(error: BaseException) -> Exception:
    """An exception that ends no loop and no process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    problem = RuntimeError(f"{type(error).__name__}: {error}".rstrip(": "))
    problem.__cause__ = error
    return problem


class _Prints:
    """Standard output, without what users' functions print; that goes to standard error."""

    def __init__(self, real: TextIO) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(sys.stderr if _is_users.get() else self._real, name)


Result = TypeVar("Result")
GRACE_S = 5.0
"""Seconds that a function has to end after it was canceled."""

_left: list[asyncio.Task[object]] = []
"""Tasks that were left behind; if they were released, their code would run at that moment."""
_stuck: ContextVar[asyncio.Future[str]] = ContextVar("stuck")


@asynccontextmanager
async def time_limit(timeout_s: float | None, what: str) -> AsyncIterator[asyncio.Timeout]:
    """Limit the time of a block, as `asyncio.timeout`; `until_stuck` observes whether it makes progress."""
    stuck, watch = _stuck.get(None), None
    if stuck is not None and timeout_s is not None:
        watch = asyncio.get_running_loop().call_later(timeout_s + GRACE_S, _note, stuck, what)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            yield limit
    finally:
        if watch is not None:
            watch.cancel()


def _note(stuck: asyncio.Future[str], what: str) -> None:
    if not stuck.done():
        stuck.set_result(what)


async def until_stuck(work: Coroutine[None, None, Result]) -> Result:
    """The result of work whose parts have time limits. It is left behind if one of them goes on.

    Raises:
        TimeoutError: A part goes on after its time limit.
    """
    stuck: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    token = _stuck.set(stuck)
    try:
        task = asyncio.ensure_future(work)
    finally:
        _stuck.reset(token)
    task.add_done_callback(lambda task: None if task.cancelled() else task.exception())  # perhaps nobody waits for it
    ends: set[asyncio.Future[Any]] = {task, stuck}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        raise
    if task.done():
        return task.result()
    task.cancel()
    raise TimeoutError(
        f"{stuck.result()} goes on {GRACE_S:g} s after its time limit, although it was canceled: let it end on "
        "asyncio.CancelledError"
    )


def run_to_end(main: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine, as `asyncio.run`. Tasks that continue after they were canceled are left behind."""
    runner = asyncio.Runner()
    try:
        return runner.run(main)
    finally:
        loop = runner.get_loop()
        left = loop.run_until_complete(end_tasks())
        if left:  # `close` would wait for them
            _left.extend(left)
            asyncio.set_event_loop(None)
            loop.close()
        else:
            runner.close()


async def end_tasks() -> set[asyncio.Task[object]]:
    """Cancel all other tasks of the loop; those that continue nevertheless."""
    others = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    for task in others:
        task.cancel()
    return (await asyncio.wait(others, timeout=GRACE_S))[1] if others else set()
