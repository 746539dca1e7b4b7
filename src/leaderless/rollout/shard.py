"""Ranks that make one engine together: each drives its own part, with the same requests in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from leaderless.data.transport import ProcessGroup
from leaderless.planner import format_ranks
from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams
from leaderless.weights.stream import WeightStream

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


class _Witness:
    """See `RolloutEngine`. An engine, with a digest of all requests, tokens and experts."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self._digest = engine, hashlib.blake2b()
        self._places: dict[int, int] = {}

    @property
    def seen(self) -> str:
        """The digest so far."""
        return self._digest.hexdigest()

    @property
    def policy_version(self) -> int | None:
        """See `RolloutEngine`."""
        return self._engine.policy_version

    def wake(self, reload: Callable[[], None]) -> None:
        """See `RolloutEngine`."""
        self._engine.wake(reload)

    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        """See `RolloutEngine`."""
        self._engine.load_weights(weights, keep_cache=keep_cache)

    def sleep(self, *, keep_weights: bool) -> None:
        """See `RolloutEngine`."""
        self._engine.sleep(keep_weights=keep_weights)

    def submit(self, request: Request, params: SamplingParams) -> int:
        """See `RolloutEngine`."""
        number = self._engine.submit(request, params)
        self._places[number] = len(self._places)
        self._note("request", list(request.prompt), list(request.sample_ids), params)
        return number

    def step(self) -> list[Delta]:
        """See `RolloutEngine`."""
        deltas = self._engine.step()
        for delta in deltas:
            self._note("delta", self._places[delta.request], delta.sibling, list(delta.tokens), delta.finish_reason)
            self._digest.update(b"".join(delta.experts))
        return deltas

    def abort(self, request: int) -> None:
        """See `RolloutEngine`."""
        self._engine.abort(request)

    def forget(self, conversation: int) -> None:
        """See `RolloutEngine`."""
        self._engine.forget(conversation)

    def close(self) -> None:
        """See `RolloutEngine`."""
        self._engine.close()

    def _note(self, *values: object) -> None:
        self._digest.update(repr(values).encode())
