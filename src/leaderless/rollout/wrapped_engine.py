"""An engine that passes its calls on to another one."""

from __future__ import annotations

from collections.abc import Callable

from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams


class WrappedEngine:
    """See `RolloutEngine`. Passes every call on to another engine; subclasses add something to some of them."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Pass calls on to `engine`."""
        self._engine = engine

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
        return self._engine.submit(request, params)

    def step(self) -> list[Delta]:
        """See `RolloutEngine`."""
        return self._engine.step()

    def abort(self, request: int) -> None:
        """See `RolloutEngine`."""
        self._engine.abort(request)

    def forget(self, conversation: int) -> None:
        """See `RolloutEngine`."""
        self._engine.forget(conversation)

    def close(self) -> None:
        """See `RolloutEngine`."""
        self._engine.close()
