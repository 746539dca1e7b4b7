"""Decoding passes over pages, recorded as CUDA graphs: one for each number of rows to which passes are rounded up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

import torch

from leaderless.distributed.errors import is_out_of_memory
from leaderless.rollout.native.cuda_graph import EAGER_PASSES, MemoryFailures, record, try_out, warn_unrecorded


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
