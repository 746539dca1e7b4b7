"""Passes of one new token a response, recorded as CUDA graphs: begun by one call instead of thousands."""

from __future__ import annotations

import warnings
from collections import Counter

import torch
from torch import Tensor

from leaderless.data.errors import is_out_of_memory
from leaderless.rollout.lean_forward import Forward
from leaderless.rollout.segment_attention import DecodeAttention

EAGER_PASSES = 2
"""Passes of the same shapes before one is recorded; they let compilers and libraries make ready what they need."""
MOST_GRAPHS = 256
"""More are not kept; the oldest goes."""


class DecodeGraphs:
    """A way through a model that records passes whose shapes come again, and replays them."""

    def __init__(self, forward: Forward) -> None:
        """Record nothing yet.

        Args:
            forward: The way through the model.
        """
        self._forward = forward
        self._is_enabled = True
        self._allocations = frozenset[int]()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._recorded: dict[tuple[int, ...], _Recorded] = {}
        self._logits = torch.empty(0, 0)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: DecodeAttention) -> Tensor:
        """A pass.

        Args:
            tokens: [n] int64, on the device.
            positions: [n] int64, on the device.
            attention: How they attend.

        Returns:
            [n, vocabulary] float32 logits, which the next pass may overwrite.
        """
        self._drop_stale(attention.allocations())
        key = attention.signature()
        inputs = [tokens, positions, *attention.tensors()]
        recorded = self._recorded.get(key)
        if recorded is not None:
            return recorded.replay(inputs)
        everywhere = torch.arange(len(tokens), device=tokens.device)
        if self._is_enabled and self._seen[key] >= EAGER_PASSES:
            try:
                recorded = self._record(inputs, attention, everywhere)
            except RuntimeError as error:
                self._recorded.clear()  # their memory may be what is missing
                self._seen.clear()
                if not is_out_of_memory(error):
                    # Some models decide on the host what comes next, as by which expert gets how many tokens.
                    warnings.warn(f"decoding is slower, since no CUDA graph can be recorded: {error}", stacklevel=2)
                    self._is_enabled = False
            else:
                if len(self._recorded) == MOST_GRAPHS:
                    del self._recorded[next(iter(self._recorded))]
                self._recorded[key] = recorded
                return recorded.replay(inputs)
        self._seen[key] += 1
        logits = self._forward(tokens, positions, attention, everywhere)
        if len(self._logits) < len(logits):
            self._logits = torch.empty_like(logits)
        return logits

    def _drop_stale(self, allocations: frozenset[int]) -> None:
        """Forget graphs of memory that keys and values have left for good."""
        if allocations != self._allocations:
            self._allocations = allocations
            self._seen.clear()
            self._recorded = {key: one for key, one in self._recorded.items() if one.allocations <= allocations}

    def _record(self, inputs: list[Tensor], attention: DecodeAttention, everywhere: Tensor) -> _Recorded:
        graph, others = torch.cuda.CUDAGraph(), list(self._recorded.values())
        # Graphs are never replayed at the same time, so that they can use the same memory in between; that of what they
        # leave behind lies outside, since it would be one for each of them.
        logits = self._logits[: len(everywhere)]
        with torch.cuda.graph(graph, pool=others[0].graph.pool() if others else None):
            logits.copy_(self._forward(inputs[0], inputs[1], attention, everywhere))
        return _Recorded(graph, inputs, [attention, everywhere], logits, attention.allocations())


class _Recorded:
    """A graph with the memory that it reads and writes."""

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: list[Tensor],
        kept: list[object],
        logits: Tensor,
        allocations: frozenset[int],
    ) -> None:
        self.graph, self.inputs, self.kept = graph, inputs, kept
        self.logits, self.allocations = logits, allocations

    def replay(self, inputs: list[Tensor]) -> Tensor:
        for own, new in zip(self.inputs, inputs, strict=True):
            if own is not new:
                own.copy_(new)
        self.graph.replay()
        return self.logits
