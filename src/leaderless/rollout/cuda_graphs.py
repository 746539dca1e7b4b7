"""Decoding passes recorded as CUDA graphs: started by one call instead of thousands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leaderless.data.errors import is_out_of_memory
from leaderless.rollout.lean_forward import Forward
from leaderless.rollout.recording import EAGER_PASSES, MemoryFailures, record, try_out, warn_unrecorded
from leaderless.rollout.segment_attention import DecodeAttention

MOST_GRAPHS = 256
"""Most graphs; the oldest is dropped for a new one."""


class DecodeGraphs:
    """A forward pass that records shapes that recur, and replays them."""

    def __init__(self, forward: Forward, failures: MemoryFailures) -> None:
        self._forward, self._failures = forward, failures
        self._is_enabled = True
        self._allocations = frozenset[int]()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._logits = torch.empty(0, 0)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """Run a pass over tokens [n] at positions [n]; the next may overwrite its [n, vocabulary] float32 logits."""
        self._drop_stale(attention.allocations())
        key = attention.signature()
        inputs = [tokens, positions, *attention.tensors()]
        recorded = self._recorded.get(key)
        if recorded is not None:
            return recorded.replay(inputs)
        everywhere = torch.arange(len(tokens), device=tokens.device)
        self._seen[key] += 1
        may_record = self._is_enabled and not self._failures.is_final(len(tokens))
        if may_record and self._seen[key] > EAGER_PASSES:
            try:
                recorded = self._record(inputs, attention, everywhere)
            except RuntimeError as error:
                self._recorded.clear()  # this may free the memory that is missing
                self._seen.clear()
                if is_out_of_memory(error):
                    self._failures.add(len(tokens), error)  # signatures change with the memory of keys
                else:
                    warn_unrecorded(error)
                    self._is_enabled = False
            else:
                if len(self._recorded) == MOST_GRAPHS:
                    del self._recorded[next(iter(self._recorded))]
                self._recorded[key] = recorded
                return recorded.replay(inputs)
        work = partial(self._forward, tokens, positions, attention, everywhere)
        if may_record and self._seen[key] == EAGER_PASSES:
            logits, self._is_enabled = try_out(work)
        else:
            logits = work()
        if len(self._logits) < len(logits):
            self._logits = torch.empty_like(logits)
        return logits

    def _drop_stale(self, allocations: frozenset[int]) -> None:
        """Drop graphs of memory that keys and values no longer use."""
        if allocations != self._allocations:
            self._allocations = allocations
            self._seen.clear()
            self._recorded = {key: one for key, one in self._recorded.items() if one.allocations <= allocations}

    def _record(self, inputs: list[Tensor], attention: DecodeAttention, everywhere: Tensor) -> _Recorded:
        # The logits lie outside of graphs: inside, each graph would have separate memory for them.
        logits = self._logits[: len(everywhere)]

        def work() -> None:
            logits.copy_(self._forward(inputs[0], inputs[1], attention, everywhere))

        graph = record(work, [one.graph for one in self._recorded.values()])
        return _Recorded(graph, inputs, [attention, everywhere], logits, attention.allocations())


@dataclass(frozen=True)
class _Recorded:
    """A graph with the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    kept: list[object]
    logits: Tensor
    allocations: frozenset[int]

    def replay(self, inputs: list[Tensor]) -> Tensor:
        for own, new in zip(self.inputs, inputs, strict=True):
            if own is not new:
                own.copy_(new)
        self.graph.replay()
        return self.logits
