"""Decoding passes over pages, recorded as CUDA graphs: one for each number of rows to which passes are rounded up."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable

import torch

from leaderless.data.errors import is_out_of_memory

EAGER_PASSES = 2
"""Passes of a kind before one is recorded; they let compilers and libraries prepare themselves."""


class BucketGraphs:
    """Runs passes, and records and replays those that come again.

    A pass reads and writes the same memory each time; `clear` has to be called before any of it is released.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_enabled = is_enabled
        self.seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, key: Hashable, compute: Callable[[], None]) -> None:
        """Run a pass. Those with the same key do the same work on the same memory."""
        self.seen[key] += 1
        graph = self._graphs.get(key)
        if graph is None and self.is_enabled and self.seen[key] > EAGER_PASSES:
            graph = self._record(key, compute)
        if graph is None:
            compute()
        else:
            graph.replay()

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
        self.seen.clear()

    def _record(self, key: Hashable, compute: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Record a pass without running it; None if this cannot be done."""
        others = list(self._graphs.values())
        # Graphs are never replayed at the same time, so that they can share memory for intermediate results. Another
        # thread of the process asks how much memory is free; with the default mode that would break a recording.
        pool = others[0].pool() if others else None
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                compute()
        except RuntimeError as error:
            self.clear()  # this may free the memory that is missing
            if not is_out_of_memory(error):
                # Some models decide on the host what to compute, such as how many tokens an expert gets.
                warnings.warn(f"decoding is slower, since no CUDA graph can be recorded: {error}", stacklevel=2)
                self.is_enabled = False
            return None
        self._graphs[key] = graph
        return graph
