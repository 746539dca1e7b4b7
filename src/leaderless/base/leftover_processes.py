"""Tells how processes ended, and ends those that a reward or an environment left behind. Imports no torch."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil


def exit_in_words(code: int) -> str:
    """The exit code of a process in words; a negative one is the number of a signal."""
    return f"exit code {code}" if code >= 0 else f"the signal {signal.Signals(-code).name}"


LAST_S = 1.0
"""Time for processes left behind by workers to end by themselves."""
END_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_HELPER = "multiprocessing.resource_tracker"
"""Python's own helper, which removes shared memory after its users have ended."""


@contextmanager
def leftovers_ended() -> Iterator[Callable[[], None]]:
    """End processes that a worker or one of its helpers leaves behind; processes that exist already are left alone.

    This process becomes the parent of processes whose own parent ends first. Yields a function that ends all leftovers
    so far.
    """
    _adopt(1)
    before = set(psutil.Process().children(recursive=True))

    def end() -> None:
        found = set(psutil.Process().children(recursive=True)) - before
        _, alive = psutil.wait_procs(filter(_is_foreign, found), timeout=LAST_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_S)

    try:
        yield end
    finally:
        end()
        _adopt(0)


def end_marked(variable: str, value: str) -> None:
    """Kill all processes that began with an environment variable of this value, whatever their parent and session."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # those of other users cannot be read
            if process.environ().get(variable) == value and _is_foreign(process):
                process.kill()


def _adopt(flag: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, flag)


def _is_foreign(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not any(_HELPER in word for word in process.cmdline())
    return True
