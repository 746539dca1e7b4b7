"""Functions of users in threads of their own, which never keep the process from ending."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from threading import Thread
from typing import TextIO, cast

_is_users: ContextVar[bool] = ContextVar("is_users", default=False)


async def call_user(function: Callable[[], object], name: str) -> object:
    """Call a user's function: awaited if it is `async`, else in a daemon thread.

    What it prints goes to standard error. If whoever waits gives up, a thread runs on by itself, and its result is
    dropped. A child that the function forks off ends where the function returns.

    Args:
        function: Function without arguments; it may return an awaitable.
        name: Name of the thread, for debuggers.

    Raises:
        RuntimeError: The function has called `sys.exit`, or ended in another way that is not an error.
    """
    _divert_prints()
    token = _is_users.set(True)
    try:
        if inspect.iscoroutinefunction(function):
            return await _awaited(function)
        result = await _in_thread(function, name)
        return await _awaited(lambda: result) if inspect.isawaitable(result) else result
    finally:
        _is_users.reset(token)


async def _awaited(function: Callable[[], object]) -> object:
    process = os.getpid()
    try:
        return await cast("Awaitable[object]", function())
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


def _divert_prints() -> None:
    if not isinstance(sys.stdout, _Prints):
        sys.stdout = cast("TextIO", _Prints(sys.stdout))
