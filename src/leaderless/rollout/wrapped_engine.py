"""Engines around another one: shared by several users, or compared between the ranks that make it together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from typing_extensions import override

from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.stream import WeightStream
from leaderless.planner import format_ranks
from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams


class WrappedEngine(RolloutEngine):
    """Passes every call on to another engine; subclasses add something to some of them."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @override
    @property
    def policy_version(self) -> int | None:
        return self._engine.policy_version

    @override
    def wake(self, reload: Callable[[], None]) -> None:
        self._engine.wake(reload)

    @override
    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None:
        self._engine.load_weights(weights, keep_cache=keep_cache)

    @override
    def sleep(self, *, keep_weights: bool) -> None:
        self._engine.sleep(keep_weights=keep_weights)

    @override
    def submit(self, request: Request, params: SamplingParams) -> int:
        return self._engine.submit(request, params)

    @override
    def step(self) -> list[Delta]:
        return self._engine.step()

    @override
    def abort(self, request: int) -> None:
        self._engine.abort(request)

    @override
    def forget(self, conversation: int) -> None:
        self._engine.forget(conversation)

    @override
    def close(self) -> None:
        self._engine.close()


class SharedEngine(WrappedEngine):
    """One view of an engine that several share; requests of a view continue while another one takes steps."""

    def __init__(self, engine: RolloutEngine, turn: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Share an engine that nobody uses yet; the shared engine is a view itself. Each step takes a turn."""
        super().__init__(engine)
        self._turn = turn
        # Of each request, where its owner finds deltas, and how many of its responses have not ended.
        self._owners: dict[int, tuple[list[Delta], int]] = {}
        self._deltas: list[Delta] = []

    def view(self) -> SharedEngine:
        """Another view of the same engine."""
        other = SharedEngine(self._engine, self._turn)
        other._owners = self._owners
        return other

    @override
    def sleep(self, *, keep_weights: bool) -> None:
        """Put the engine to sleep; all views lose their requests."""
        for deltas, _ in self._owners.values():
            deltas.clear()
        self._owners.clear()
        super().sleep(keep_weights=keep_weights)

    @override
    def submit(self, request: Request, params: SamplingParams) -> int:
        number = super().submit(request, params)
        self._owners[number] = self._deltas, len(request.sample_ids)
        return number

    @override
    def step(self) -> list[Delta]:
        """Take a step; what other views have got by it waits for their next step."""
        if not self._deltas:
            with self._turn():
                deltas = super().step()
            for delta in deltas:
                if delta.request not in self._owners:
                    continue  # aborted
                found, num_left = self._owners.pop(delta.request)
                found.append(delta)
                num_left -= delta.finish_reason is not None
                if num_left:
                    self._owners[delta.request] = found, num_left
        return self.collect()

    def collect(self) -> list[Delta]:
        """Deltas for this view that steps of other views have brought."""
        deltas = [*self._deltas]
        self._deltas.clear()
        return deltas

    @override
    def abort(self, request: int) -> None:
        """Abort a request; no later step reports it."""
        super().abort(request)
        self._owners.pop(request, None)
        self._deltas[:] = [delta for delta in self._deltas if delta.request != request]


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
            self._digest.update(b"".join((*delta.experts, *delta.support)))
        return deltas

    def _note(self, *values: object) -> None:
        self._digest.update(repr(values).encode())
