"""Ranks that make one engine together: each drives its own part, with the same requests in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import format_ranks
from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams
from leaderless.rollout.wrapped_engine import WrappedEngine

ALONE = ProcessGroup((0,), 0)
"""One rank whose engine is its own."""


@contextmanager
def compared(engine: RolloutEngine, shard: ProcessGroup) -> Iterator[RolloutEngine]:
    """The engine, or a rank's part of it, for one phase; at its end the ranks of the shard compare what it has done.

    Ranks of a shard have to hold the same rows, so all that they sample must be the same.

    Raises:
        RuntimeError: Ranks have asked for other responses than the first, or have other tokens. All ranks of the shard
            raise it.
    """
    if shard.size == 1:
        yield engine
        return
    witness = _Witness(engine)
    yield witness
    what = f"what the engine of ranks {format_ranks(shard.ranks)} has sampled"
    others = shard.unlike_first(witness.seen, what)
    if others:
        raise RuntimeError(
            f"rank {shard.rank}: ranks {format_ranks(shard.ranks)} make one engine, but those of rank "
            f"{format_ranks(others)} are other requests or other tokens or experts than those of rank "
            f"{shard.ranks[0]}: a stage must ask for the same responses, in the same order, on all ranks that hold the "
            "same rows; if it does, use an engine that samples the same on all its ranks, or leave out tp"
        )


class _Witness(WrappedEngine):
    """An engine, with a digest of all requests, tokens and experts."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self._digest = hashlib.blake2b()
        self._places: dict[int, int] = {}

    @property
    def seen(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()

    @override
    def submit(self, request: Request, params: SamplingParams) -> int:
        number = super().submit(request, params)
        self._places[number] = len(self._places)
        self._note("request", list(request.prompt), list(request.sample_ids), params)
        return number

    @override
    def step(self) -> list[Delta]:
        deltas = super().step()
        for delta in deltas:
            self._note("delta", self._places[delta.request], delta.sibling, list(delta.tokens), delta.finish_reason)
            self._digest.update(b"".join(delta.experts))
        return deltas

    def _note(self, *values: object) -> None:
        self._digest.update(repr(values).encode())
