"""Time limits of users' `async` functions, which may go on after they were canceled. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Result = TypeVar("Result")
GRACE_S = 5.0
"""Seconds that a function has to end after it was canceled."""

_left: list[asyncio.Task[object]] = []
"""Tasks that were left behind; if they were released, their code would run at that moment."""
_stuck: ContextVar[asyncio.Future[str]] = ContextVar("stuck")


@asynccontextmanager
async def time_limit(timeout_s: float | None, what: str) -> AsyncIterator[asyncio.Timeout]:
    """Limit the time of a block, as `asyncio.timeout`; `until_stuck` observes whether it makes progress.

    Args:
        timeout_s: Seconds that it may take; None for any time.
        what: Name of what is inside, for people.
    """
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
        left = loop.run_until_complete(_end_tasks())
        if left:  # `close` would wait for them
            _left.extend(left)
            asyncio.set_event_loop(None)
            loop.close()
        else:
            runner.close()


async def _end_tasks() -> set[asyncio.Task[object]]:
    """Cancel all other tasks; those that go on."""
    others = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    for task in others:
        task.cancel()
    return (await asyncio.wait(others, timeout=GRACE_S))[1] if others else set()
