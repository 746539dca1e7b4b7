"""One engine outside of this package for the adapters of several roles, whose models have the same base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Protocol
from weakref import WeakValueDictionary

from typing_extensions import override

from leaderless.config import Recipe
from leaderless.config.models import ModelConfig
from leaderless.distributed.remote.messages import Ask, Gain
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights.stream import WeightStream
from leaderless.planner import Layout, RoleInstance
from leaderless.rollout.external.engine import ENDS, Driver


class AdapterDriver(Driver, Protocol):
    """A `Driver` whose adapters have names; work with some does not disturb what is in progress with others.

    Each request has the name of its adapters, which is empty for those of the whole weights.
    """

    @override
    def load(self, weights: WeightStream, adapter: str = "") -> None:
        """Use other adapters of a name, or other weights, from now on, and abort what is in progress with them."""

    @override
    def prompt_log_probs(self, tokens: Sequence[int], adapter: str = "") -> list[float]: ...


class Host:
    """An engine that is used by several roles, each with adapters of its own; see `LoraSlot`.

    Attributes:
        models: Models of these roles.
        records_experts: Whether it records choices of experts, as it does for all roles if one replays them.
        driver: The engine; set before any role uses it.
    """

    driver: AdapterDriver

    def __init__(self, models: Mapping[str, ModelConfig], *, records_experts: bool = False) -> None:
        self.models, self.records_experts = models, records_experts
        self._users, self._awake = set[LoraSlot](), set[LoraSlot]()
        self._num_starts = self._num_asked = 0
        self._is_started = self._has_failed = False
        self._owners: dict[int, tuple[LoraSlot, int]] = {}  # of each request, with its own number for it

    def enter(self, seat: LoraSlot) -> int:
        """Start the engine, if it is not; return the number of its start."""
        self._users.add(seat)
        if not self._is_started:
            self._num_starts, self._is_started = self._num_starts + 1, True
            with self.used(self._num_starts) as driver:
                driver.start()
        return self._num_starts

    @contextmanager
    def used(self, start: int) -> Iterator[AdapterDriver]:
        """The engine, for a call of a role that knows it since some start.

        Raises:
            EngineError: It fails, or has ended since then because a call of another role failed.
        """
        if start != self._num_starts or not self._is_started:
            raise EngineError(f"the engine of {' and '.join(self.models)} failed when another role used it")
        try:
            yield self.driver
        except EngineError:
            self._has_failed = True
            raise

    def wake(self, seat: LoraSlot, start: int) -> None:
        """Wake the engine, if it is asleep."""
        with self.used(start) as driver:
            if not self._awake:
                driver.wake()
            self._awake.add(seat)

    def sleep(self, seat: LoraSlot, start: int) -> None:
        """Have the engine sleep once no role needs it. The model that all adapters belong to stays."""
        with self.used(start) as driver:
            is_last = self._awake == {seat}
            self._awake.discard(seat)
            if is_last:
                driver.sleep(keep_weights=True)

    def leave(self, seat: LoraSlot) -> None:
        """Stop the engine if no role uses it any more, or if it has failed."""
        self._users.discard(seat)
        if self._is_started and (self._has_failed or not self._users):
            self.driver.close()
            self._is_started = self._has_failed = False
            self._awake.clear()
            self._owners.clear()
        elif self._is_started:
            with suppress(EngineError):  # the next call of another role fails, too, and starts the engine again
                self.abort(seat, self._num_starts)
                self.sleep(seat, self._num_starts)
            self._awake.discard(seat)

    def submit(self, seat: LoraSlot, start: int, asks: Sequence[Ask]) -> None:
        """Ask for responses of a role."""
        with self.used(start) as driver:
            first = self._num_asked + 1
            self._num_asked += len(asks)
            self._owners |= {number: (seat, ask.id) for number, ask in enumerate(asks, first)}
            driver.submit([replace(ask, id=number, adapter=seat.role) for number, ask in enumerate(asks, first)])

    def step(self, start: int) -> None:
        """Continue, and give each role what its responses have gained."""
        with self.used(start) as driver:
            gains = driver.step()
        for gain in gains:
            if (owner := self._owners.get(gain.id)) is None:
                continue  # it has been aborted in the meantime
            seat, number = owner
            seat.gains.append(gain._replace(id=number))
            if gain.finish_reason is not None:
                del self._owners[gain.id]
                self._has_failed |= gain.finish_reason not in ENDS  # its role will have the engine started again

    def abort(self, seat: LoraSlot, start: int, ids: Sequence[int] | None = None) -> None:
        """Abort some responses of a role, or all."""
        found = [host for host, (one, own) in self._owners.items() if one is seat and (ids is None or own in ids)]
        for number in found:
            del self._owners[number]
        if found:
            with self.used(start) as driver:
                driver.abort(found)


Sharing = tuple[tuple[str, Layout, str], ...]
"""Role, ranks and engine of each instance that shares an engine with others."""


def shared_by(companions: Sequence[RoleInstance]) -> Sharing:
    """The instances that have one engine together; empty for one that is alone, whose engine is its own."""
    return tuple((one.role, one.layout, one.engine) for one in companions) if len(companions) > 1 else ()


class Hosts:
    """The engines of a rank that several roles share, each as long as one of these has it."""

    def __init__(self) -> None:
        self._kept = WeakValueDictionary[Sharing, Host]()

    def of(self, companions: Sequence[RoleInstance], recipe: Recipe) -> Host | None:
        """The engine of some instances; None for one that is alone, whose engine is its own."""
        key = shared_by(companions)
        if not key:
            return None
        if (host := self._kept.get(key)) is None:
            models = {one.role: recipe.model_of(one.role) for one in companions}
            host = self._kept[key] = Host(
                {role: model for role, model in models.items() if model is not None},
                records_experts=any(recipe.as_seen_by(role).algorithm.replay_experts for role in models),
            )
        return host


class LoraSlot(Driver):
    """Engine as one role sees it, which has its own adapters there.

    Attributes:
        role: Role that uses it, after which its adapters are named.
        gains: Gains of its responses that steps of other roles have brought.
    """

    def __init__(self, host: Host, role: str) -> None:
        self._host, self.role, self._start = host, role, 0
        self.gains: list[Gain] = []

    @override
    def start(self) -> None:
        self._start = self._host.enter(self)

    @override
    def wake(self) -> None:
        self._host.wake(self, self._start)

    @override
    def sleep(self, *, keep_weights: bool) -> None:
        """Put the engine to sleep once all of its roles sleep; it keeps all weights."""
        self._abort_all()
        self._host.sleep(self, self._start)

    @override
    def load(self, weights: WeightStream) -> None:
        self._abort_all()
        with self._host.used(self._start) as driver:
            driver.load(weights, self.role)

    def _abort_all(self) -> None:
        self.gains.clear()
        self._host.abort(self, self._start)

    @override
    def prompt_log_probs(self, tokens: Sequence[int]) -> list[float]:
        with self._host.used(self._start) as driver:
            return driver.prompt_log_probs(tokens, self.role)

    @override
    def submit(self, asks: Sequence[Ask]) -> None:
        self._host.submit(self, self._start, asks)

    @override
    def step(self) -> list[Gain]:
        """Take a step; what other roles have got by it waits for their next step, even if it is aborted meanwhile."""
        if not self.gains:
            self._host.step(self._start)
        gains, self.gains = self.gains, []
        return gains

    @override
    def abort(self, ids: Sequence[int]) -> None:
        self._host.abort(self, self._start, ids)

    @override
    def close(self) -> None:
        """Stop the engine with the last of its roles, or if it has failed."""
        self._host.leave(self)
