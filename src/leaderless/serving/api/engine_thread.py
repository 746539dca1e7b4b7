"""The thread that owns the engine, which batches the requests of all clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from leaderless.distributed.errors import is_out_of_memory
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.rollout.weight_sources import Serving
from leaderless.serving.http_server import STOPPING, ApiError

MAX_WAITING = 4096
"""Most responses that clients may wait for at a time, unless a user says otherwise."""
TOO_MUCH = "out of memory: ask for fewer tokens, or start the server with a lower --max-sequences or --max-context"


@dataclass(eq=False)
class Ticket:
    """The prompts of one request, and their unfinished responses."""

    num_left: int
    arrived: asyncio.Queue[Sequence[Delta] | Exception] = field(default_factory=asyncio.Queue)
    """New tokens of each step, or an error at the end."""
    is_dropped: bool = False
    """Whether the client no longer waits for the responses."""
    num_tokens: int = 0
    """Number of tokens that have arrived."""
    num_asked: int = field(init=False)
    """Number of responses that count as waited for."""

    def __post_init__(self) -> None:
        self.num_asked = self.num_left

    async def deltas(self) -> AsyncIterator[Delta]:
        """Iterate over new tokens until all responses have ended; `request` is the index of the prompt.

        Raises:
            ApiError: The responses were canceled.
        """
        while self.num_left:
            arrived = await self.arrived.get()
            if isinstance(arrived, Exception):
                self.num_left = 0
                raise arrived
            for delta in arrived:
                self.num_left -= delta.finish_reason is not None
                self.num_tokens += len(delta.tokens)
                yield delta


@dataclass
class _UnderWay:
    """A prompt in the engine: its request, its index there, and its number of unfinished responses."""

    ticket: Ticket
    place: int
    num_left: int


class EngineHost:
    """Runs an engine in a separate thread, for clients in one event loop.

    Only that thread uses the engine. It receives orders through a queue, and passes the new tokens of each step
    to the event loop at once.
    """

    def __init__(self, serving: Serving, max_waiting: int = MAX_WAITING) -> None:
        """Prepare the thread; requests for more than `max_waiting` responses at a time are refused."""
        self._serving, self._engine, self._max_waiting = serving, serving.engine, max_waiting
        self._num_waiting = 0
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._under_way: dict[int, _UnderWay] = {}
        self._num_ended = self._num_tokens = self._num_told = 0
        self.is_stopping = False
        """Whether requests are no longer answered."""
        self._asking = threading.Lock()
        """Held so that no order is lost while the thread ends."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._last_error = ApiError(503, STOPPING)
        """Error that unfinished requests get when the thread ends."""
        self.failure: BaseException | None = None
        """Error that ended the thread, if any."""
        self._begun = asyncio.Event()

    def __enter__(self) -> Self:
        """Start the thread, from within the event loop of the clients."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the thread, and raise the error that ended it, if any."""
        self.stop()
        self._thread.join()
        if self.failure is not None and error is None:
            raise self.failure

    async def begun(self) -> bool:
        """Wait until the engine has its weights, which may take long; returns False if it stopped instead."""
        await self._begun.wait()
        return not self.is_stopping

    def ask(self, requests: Sequence[Request], params: SamplingParams) -> Ticket:
        """Submit prompts, whose ticket has to be dropped in the end.

        Raises:
            ApiError: The thread is ending, or too many responses are waited for.
        """
        ticket = Ticket(sum(len(request.sample_ids) for request in requests))
        if self._num_waiting and self._num_waiting + ticket.num_asked > self._max_waiting:
            message = (
                f"{self._num_waiting:,} responses are waited for, and with these {ticket.num_asked:,} there would be "
                f"more than {self._max_waiting:,} (--max-waiting): ask again later"
            )
            raise ApiError(429, message, code="rate_limit_exceeded")
        with self._asking:
            if self.is_stopping:
                raise ApiError(503, STOPPING)
            self._orders.put(lambda: self._submit(ticket, requests, params))
        self._num_waiting += ticket.num_asked
        return ticket

    def drop(self, ticket: Ticket) -> bool:
        """Cancel the unfinished responses of a request; returns whether there are any."""
        self._num_waiting -= ticket.num_asked
        ticket.num_asked = 0
        if not ticket.num_left:
            return False
        ticket.is_dropped = True
        self._orders.put(lambda: self._abort(ticket))
        return True

    def news(self) -> str:
        """Describe what is answered and has been so far; empty if there is nothing new since the last call."""
        if not self._under_way and self._num_tokens == self._num_told:
            return ""
        self._num_told = self._num_tokens
        done = f"{self._num_ended:,} responses with {self._num_tokens:,} tokens"
        return f"in progress: {len(self._under_way):,} prompts; done: {done}"

    def stop(self) -> None:
        """Cancel all responses, and end the thread."""
        self.is_stopping = True
        self._orders.put(lambda: None)

    def _run(self) -> None:
        try:
            with self._serving.phase():
                self._loop.call_soon_threadsafe(self._begun.set)
                while not self.is_stopping:
                    self._take_orders()
                    self._step()
        except BaseException as failure:  # noqa: BLE001 - the end of the thread; `__exit__` raises it
            self._last_error = ApiError(500, f"the engine has failed: {failure}")
            with self._asking:
                self.failure, self.is_stopping = failure, True
        self._loop.call_soon_threadsafe(self._begun.set)
        self._take_orders()
        self._cancel_all(self._last_error)

    def _take_orders(self) -> None:
        """Carry out all orders; wait for one if there is nothing else to do."""
        while not self._under_way and not self.is_stopping:
            self._orders.get()()
        while not self._orders.empty():
            self._orders.get()()

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            # The error of an engine in another process quotes its log, which may mention anything.
            if isinstance(error, EngineError) or not is_out_of_memory(error):
                raise
            for number in self._under_way:
                self._engine.abort(number)
            self._cancel_all(ApiError(503, TOO_MUCH))
        else:
            self._pass_on(deltas)

    def _submit(self, ticket: Ticket, requests: Sequence[Request], params: SamplingParams) -> None:
        if self.is_stopping:
            self._send([(ticket, self._last_error)])
            return
        try:
            for place, request in enumerate(requests):
                number = self._engine.submit(request, params)
                self._under_way[number] = _UnderWay(ticket, place, len(request.sample_ids))
        except ValueError as error:  # one client's mistake is no reason to leave the others alone
            for number in [number for number, one in self._under_way.items() if one.ticket is ticket]:
                self._engine.abort(number)
                del self._under_way[number]
            self._send([(ticket, ApiError(400, f"the engine refuses the request: {error}"))])

    def _abort(self, ticket: Ticket) -> None:
        for number in [number for number, one in self._under_way.items() if one.ticket is ticket]:
            self._engine.abort(number)

    def _pass_on(self, deltas: Sequence[Delta]) -> None:
        """Pass the new tokens of a step to their clients."""
        by_ticket: dict[Ticket, list[Delta]] = {}
        for delta in deltas:
            one = self._under_way.get(delta.request)
            if one is None:
                continue  # canceled when memory ran out
            one.num_left -= delta.finish_reason is not None
            self._num_ended += delta.finish_reason is not None
            self._num_tokens += len(delta.tokens)
            if not one.num_left:
                del self._under_way[delta.request]
            by_ticket.setdefault(one.ticket, []).append(delta._replace(request=one.place))
        self._send([(ticket, added) for ticket, added in by_ticket.items() if not ticket.is_dropped])

    def _cancel_all(self, error: Exception) -> None:
        tickets = dict.fromkeys(one.ticket for one in self._under_way.values())
        self._under_way.clear()
        self._send([(ticket, error) for ticket in tickets])

    def _send(self, news: Sequence[tuple[Ticket, Sequence[Delta] | Exception]]) -> None:
        def deliver() -> None:
            for ticket, arrived in news:
                ticket.arrived.put_nowait(arrived)

        if news:
            self._loop.call_soon_threadsafe(deliver)
