"""Processes that a reward or an environment has started and not ended. Imports no torch."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

LAST_S = 1.0
"""Time for what workers have left behind to end by itself."""
END_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36
_HELPER = "multiprocessing.resource_tracker"
"""Python's own helper, which removes shared memory when those who used it are gone."""


class Leftovers:
    """Makes this process the parent of all whose own parent, a worker or one of its helpers, ends without them."""

    def __enter__(self) -> Self:
        """Take over; processes that are there already are left alone."""
        self._adopt(1)
        self._others = set(psutil.Process().children(recursive=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what is left, and adopt no more."""
        self.end()
        self._adopt(0)

    def end(self) -> None:
        """End all processes below this one that were not there before."""
        found = set(psutil.Process().children(recursive=True)) - self._others
        _, alive = psutil.wait_procs(filter(_is_foreign, found), timeout=LAST_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=END_S)

    def _adopt(self, flag: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, flag)


def _is_foreign(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return not any(_HELPER in word for word in process.cmdline())
    return True
