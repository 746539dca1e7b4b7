"""One engine for several users, each of which sees only what it has asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from typing_extensions import override

from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams
from leaderless.rollout.wrapped_engine import WrappedEngine


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
