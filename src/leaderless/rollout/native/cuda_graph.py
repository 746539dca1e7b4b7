"""Work of a CUDA device recorded as a graph: started by one call instead of thousands.

Decoding passes over pages are recorded so: one graph for each number of rows to which passes are rounded up.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import torch

from leaderless.distributed.errors import is_out_of_memory

EAGER_PASSES = 2
"""Passes of a kind before one is recorded; they let compilers and libraries prepare themselves."""

MOST_FAILURES = 3
"""Recordings of a kind of pass that run out of memory before no other one is tried."""

LITTLE_BYTES = 1 << 30
"""Free memory of a device with which a recording may have too little."""

Result = TypeVar("Result")


class MemoryFailures:
    """Recordings that ran out of memory, by kind of pass. Each waits for the device, and drops all other graphs."""

    def __init__(self) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._is_said = False

    def add(self, key: Hashable, error: RuntimeError) -> None:
        """Count a failure of passes of a kind; the first kind that is abandoned gets a warning."""
        self._counts[key] += 1
        if self.is_final(key) and not self._is_said:
            self._is_said = True
            warnings.warn(
                f"decoding is slower, since there is too little memory to record passes of some sizes: {error}; lower "
                "rollout.max_sequences, or leave more memory free",
                stacklevel=3,
            )

    def is_final(self, key: Hashable) -> bool:
        """Whether passes of a kind are not to be recorded any more."""
        return self._counts[key] >= MOST_FAILURES


def record(work: Callable[[], None], others: Sequence[torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph:
    """Record work without running it.

    Memory that torch holds, but does not use, stays with it, and the device goes on with what was started before:
    `torch.cuda.graph` would wait for the device and release pinned memory, which the next pass would have to page-lock
    again. Only if the device has little memory is unused memory released, since torch cannot do so during a recording:
    before it where little is free, and again if it was too little all the same.

    Args:
        work: Function that starts it.
        others: Graphs that are never replayed at the same time, so that they can share memory for their results.

    Raises:
        RuntimeError: It cannot be recorded. Torch computes on the stream on which it did before.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < LITTLE_BYTES:
        _release_unused()
    try:
        return _recorded(work, others)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    _release_unused()
    return _recorded(work, others)


def _release_unused() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _recorded(work: Callable[[], None], others: Sequence[torch.cuda.CUDAGraph]) -> torch.cuda.CUDAGraph:
    """Record work into a graph, as things are."""
    graph, pool = torch.cuda.CUDAGraph(), others[0].pool() if others else None
    # Another thread of the process asks how much memory is free: the default mode would break a recording then.
    with _no_collection(), torch.cuda.stream(_side_stream(torch.cuda.current_device())):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # of what cannot be recorded, the first error gives the reason
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@cache
def _side_stream(device: int) -> torch.cuda.Stream:  # noqa: ARG001 - each device has a stream
    """The stream on which work is recorded: recordings share only memory that belongs to the same stream."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def run_without_waiting(work: Callable[[], Result]) -> Result:
    """Run work, and raise a RuntimeError where the host waits in it: such work cannot be recorded.

    If it were tried all the same, torch 2.11 could no longer free the memory that it keeps.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return work()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def try_out(work: Callable[[], Result]) -> tuple[Result, bool]:
    """Run work in its last pass before a recording; returns also whether it can be recorded.

    If the host waits in it, it is run again as it is.
    """
    try:
        return run_without_waiting(work), True
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        warn_unrecorded(error)
    return work(), False


def warn_unrecorded(error: RuntimeError) -> None:
    """Say why decoding passes are not recorded."""
    # Some models decide on the host what to compute, such as how many tokens an expert gets.
    warnings.warn(f"decoding is slower, since no CUDA graph can be recorded: {error}", stacklevel=3)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Have Python collect no garbage: graphs and pinned memory cannot be freed in a recording."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


class BucketGraphs:
    """Runs passes, and records and replays those that come again.

    A pass reads and writes the same memory each time; `clear` has to be called before any of it is released.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.seen: Counter[Hashable] = Counter()
        self._failures = MemoryFailures()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, compute: Callable[[], None]) -> None:
        """Run a pass. Those with the same key do the same work on the same memory."""
        self.seen[key] += 1
        graph = self._graphs.get(key)
        may_record = self.is_enabled and not self._failures.is_final(key)
        if graph is None and may_record and self.seen[key] > EAGER_PASSES:
            graph = self._record(key, compute)
        if graph is not None:
            graph.replay()
        elif may_record and self.seen[key] == EAGER_PASSES:
            _, self.is_enabled = try_out(compute)
        else:
            compute()

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self.seen.clear()

    def _record(self, key: Hashable, compute: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Record a pass without running it; None if this cannot be done."""
        try:
            graph = record(compute, [*self._graphs.values()])
        except RuntimeError as error:
            self.clear()  # this may free the memory that is missing
            if is_out_of_memory(error):
                self._failures.add(key, error)
            else:
                warn_unrecorded(error)
                self.is_enabled = False
            return None
        self._graphs[key] = graph
        return graph
