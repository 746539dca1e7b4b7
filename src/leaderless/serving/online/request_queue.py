"""Brings requests from the thread that talks to clients to the engine, which the rank's main thread owns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from typing_extensions import override

from leaderless.environments.engine_scheduler import BEAT_S, EngineScheduler
from leaderless.rollout.engine import Completion, Delta, Request, RolloutEngine, SamplingParams


@dataclass(eq=False)
class RequestOrder:
    """A response that is wanted.

    Attributes:
        request: Prompt with one sample id.
        params: Distribution and limits.
        answer: Future for which the client waits, in its own thread.
        completion: Tokens sampled so far, by weights of one version or several.
        is_dropped: Whether nobody wants it any more.
    """

    request: Request
    params: SamplingParams
    answer: Future[Completion] = field(default_factory=Future)
    completion: Completion = field(default_factory=Completion)
    is_dropped: bool = False


class OnlineScheduler(EngineScheduler):
    """Orders of clients; those that are not finished when the engine leaves are continued when it comes back.

    Attributes:
        is_serving: Whether an engine is at work.
        num_leavings: Number of times that an engine has left.
        known_tokens: Tokens that engines had read before; always 0, since no conversation has a second response.
        cached_tokens: Tokens that engines still had in their caches.
        busy_s: Seconds of work of engines since the last call of `serve`.
    """

    def __init__(self) -> None:
        self._waiting: deque[RequestOrder] = deque()
        self._under_way: dict[int, RequestOrder] = {}
        self._lock, self._news = threading.Lock(), threading.Event()
        self._end: Exception | None = None
        self.is_serving, self.num_leavings = False, 0
        self.known_tokens = self.cached_tokens = self.num_drafted = self.num_accepted = 0
        self.busy_s = 0.0

    @override
    async def ask(self, request: Request, params: SamplingParams, known_tokens: int = 0) -> Completion:
        """Sample one response, as soon as there is an engine; no further turn follows."""
        order = RequestOrder(replace(request, conversation=None), params)
        with self._lock:
            if self._end is not None:
                raise self._end
            self._waiting.append(order)
        self._news.set()
        try:
            return await asyncio.wrap_future(order.answer)
        except asyncio.CancelledError:
            order.is_dropped = True
            self._news.set()
            raise

    @override
    def forget(self, conversation: int) -> None:
        """Do nothing: engines keep no conversation."""

    def wake(self) -> None:
        """Let `serve` ask again whether it is done."""
        self._news.set()

    def serve(self, engine: RolloutEngine, is_done: Callable[[], bool], beat: Callable[[], None]) -> None:
        """Work on all orders until something is done.

        Args:
            engine: Engine that is awake and has weights.
            is_done: Function that says whether to leave; it is asked after every step, and at least every second.
            beat: Function that is called then as a sign of life.
        """
        self.busy_s, self.is_serving = 0.0, True
        try:
            while not is_done():
                self._submit(engine)
                if self._under_way:
                    begin = time.perf_counter()
                    deltas = engine.step()
                    self.busy_s += time.perf_counter() - begin
                    self._deliver(deltas)
                else:
                    self._news.wait(BEAT_S)
                    self._news.clear()
                beat()
        finally:
            self._interrupt(engine)

    def close(self, error: Exception) -> None:
        """Take no orders any more, and give those that wait an error."""
        with self._lock:
            self._end, left = error, [*self._waiting]
            self._waiting.clear()
        for order in left:
            if order.answer.set_running_or_notify_cancel():
                order.answer.set_exception(error)

    def _submit(self, engine: RolloutEngine) -> None:
        for number, order in list(self._under_way.items()):
            if order.is_dropped:
                engine.abort(number)
                del self._under_way[number]
        with self._lock:
            while self._waiting:
                order = self._waiting[0]
                if not order.is_dropped:
                    begun = [order.completion] if order.completion.tokens else []
                    self._under_way[engine.submit(replace(order.request, begun=begun), order.params)] = order
                self._waiting.popleft()  # after an error it is still there, and learns of the end

    def _deliver(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            order = self._under_way.get(delta.request)
            if order is None:
                continue  # aborted
            order.completion.add(delta)
            if delta.finish_reason is not None:
                del self._under_way[delta.request]
                if order.answer.set_running_or_notify_cancel():
                    order.answer.set_result(order.completion)

    def _interrupt(self, engine: RolloutEngine) -> None:
        """Let the engine go, and keep what has been sampled."""
        self.is_serving = False
        self.num_leavings += 1
        orders = list(self._under_way.items())
        self._under_way.clear()
        with self._lock:
            self._waiting.extendleft(order for _, order in reversed(orders))
        for number, _ in orders:
            engine.abort(number)
