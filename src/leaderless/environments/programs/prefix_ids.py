"""Numbers for the engine, by which it knows what it has already read."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from leaderless.environments.episode_trace import TraceNode

if TYPE_CHECKING:
    from leaderless.environments.engine_scheduler import EngineScheduler


class Lines:
    """Numbers of conversations for the engine: growing sequences, in each of which one answer is sampled at a time."""

    def __init__(self, prefix: str, pump: EngineScheduler) -> None:
        self._prefix, self._pump = prefix, pump
        self._ends: dict[int, TraceNode | None] = {}  # None while an answer is sampled

    def take(self, end: TraceNode) -> tuple[int, int]:
        """The conversation that a context continues, perhaps a new one, and the number of tokens that it has."""
        last = end.parent if end.said is None else end
        for line, newest in self._ends.items():
            if newest is not None and newest is last:
                self._ends[line] = None
                return line, len(newest.context())
        line = number_of(f"{self._prefix}/line/{len(self._ends)}")
        self._ends[line] = None
        return line, 0

    def free(self, line: int, end: TraceNode | None) -> None:
        """End the turn of a conversation, at the node of its answer if there is one."""
        if end is not None:
            self._ends[line] = end

    def close(self) -> None:
        """Let the engine forget all conversations."""
        for line in self._ends:
            self._pump.forget(line)


def number_of(text: str) -> int:
    """63 bits that follow from a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
