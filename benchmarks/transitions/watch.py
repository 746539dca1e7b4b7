"""The time and the memory that a process takes for a transition."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from benchmarks.transitions.case import Message
from benchmarks.transitions.contents import Contents
from pydantic import RootModel

_LIBC = ctypes.CDLL(None)
_MADV_DONTNEED = 4
PAGE_BYTES = 4096
"""Granularity of the kernel's account of memory."""


class Observation(Message):
    """One process in one transition.

    Attributes:
        host: Host it runs on.
        started: Time when its clock began, in seconds; all processes of the machine share one clock.
        ended: Time when the process had its rows.
        peak_bytes: Most memory in use, above what was in use before.
        busy_cores: Mean number of the machine's cores in use, by all processes.
        held: Rows that the process had before.
        got: Rows that it has afterwards.
    """

    host: int
    started: float
    ended: float
    peak_bytes: int
    busy_cores: float
    held: Contents
    got: Contents


class Observations(RootModel[list[Observation]]):
    """Observations of all processes behind one end of a channel."""


class Watch:
    """Clock and peak memory of a `with` block."""

    started = ended = busy_cores = 0.0
    peak_bytes = 0

    def __init__(self, wait_for_others: Callable[[], object] | None = None) -> None:
        """Prepare the watch.

        Args:
            wait_for_others: Function called before the clock starts.
        """
        self._wait_for_others = wait_for_others

    def __enter__(self) -> Self:
        gc.collect()
        _LIBC.malloc_trim(0)
        _forget_shared_pages()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again
        if self._wait_for_others is not None:
            self._wait_for_others()
        self._before = _status_bytes("VmRSS")
        self._cpu_before = psutil.cpu_times()
        self.started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended = time.monotonic()
        self.peak_bytes = max(PAGE_BYTES, _status_bytes("VmHWM") - self._before)
        cpu = psutil.cpu_times()
        used = sum(cpu) - sum(self._cpu_before) - (cpu.idle - self._cpu_before.idle)
        used -= cpu.iowait - self._cpu_before.iowait
        self.busy_cores = round(used / max(self.ended - self.started, 1e-9), 2)

    def observation(self, host: int, held: Contents, got: Contents) -> Observation:
        """The measurements of the block.

        Args:
            host: Host this process runs on.
            held: Rows it had before.
            got: Rows it has now.
        """
        return Observation(
            host=host,
            started=self.started,
            ended=self.ended,
            peak_bytes=self.peak_bytes,
            busy_cores=self.busy_cores,
            held=held,
            got=got,
        )


def _status_bytes(key: str) -> int:
    """A line of the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no line {key}: the kernel keeps no account of memory")


def _forget_shared_pages() -> None:
    """Unmap the pages of Ray's object store, so that those of this transition are counted again; nothing is lost."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        if "/dev/shm/plasma" in line:
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
