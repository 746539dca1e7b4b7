"""An engine that passes its calls on to another one."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from leaderless.distributed.weights.stream import WeightStream
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
