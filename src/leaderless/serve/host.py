"""The thread that owns the engine: all requests meet in its batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from leaderless.data.errors import is_out_of_memory
from leaderless.rollout.child_server import EngineError
from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams
from leaderless.serve.errors import STOPPING, ApiError
from leaderless.training.engine import TrainEngine

TOO_MUCH = "memory has run out: ask for fewer tokens; who started the server may lower --max-sequences or --max-context"


@dataclass(eq=False)
class Ticket:
    """Some prompts that one client has asked about.

    Attributes:
        num_left: Responses that have not ended.
        arrived: What steps have added, and perhaps an error in the end.
        is_dropped: Nobody waits for the responses any more.
    """

    num_left: int
    arrived: asyncio.Queue[Sequence[Delta] | Exception] = field(default_factory=asyncio.Queue)
    is_dropped: bool = False

    async def deltas(self) -> AsyncIterator[Delta]:
        """What is added to the responses, until all have ended; `request` is the place of the prompt.

        Raises:
            ApiError: They were given up.
        """
        while self.num_left:
            arrived = await self.arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            for delta in arrived:
                self.num_left -= delta.finish_reason is not None
                yield delta


@dataclass
class _UnderWay:
    """A request in the engine: whose it is, which of the prompts, and how many responses have not ended."""

    ticket: Ticket
    place: int
    num_left: int


class EngineHost:
    """Runs an engine in a thread of its own, which alone touches it; asked from one event loop.

    Orders reach the thread through a queue. After each step the event loop gets all that the step has added at once.
    """

    def __init__(self, engine: RolloutEngine, trainer: TrainEngine) -> None:
        """Nothing runs yet.

        Args:
            engine: That answers.
            trainer: Whose weights it answers with.
        """
        self._engine, self._trainer = engine, trainer
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._under_way: dict[int, _UnderWay] = {}
        self._is_stopping = False
        self._asking = threading.Lock()
        """No order comes in unseen while the thread ends."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._farewell = ApiError(503, STOPPING)
        """What clients are told in the end."""
        self.failure: BaseException | None = None
        """What ended the thread, if it was not asked to end."""
        self._begun = asyncio.Event()

    def __enter__(self) -> Self:
        """Start the thread. The event loop that asks has to run already."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the thread, and raise what has ended it before."""
        self.stop()
        self._thread.join()
        if self.failure is not None and error is None:
            raise self.failure

    async def begun(self) -> bool:
        """Wait until the engine has its weights; whether it has. Starting one of another process takes a while."""
        await self._begun.wait()
        return not self._is_stopping

    @property
    def is_ending(self) -> bool:
        """Nothing is answered any more."""
        return self._is_stopping

    def ask(self, requests: Sequence[Request], params: SamplingParams) -> Ticket:
        """Have prompts answered.

        Args:
            requests: The prompts, with the sample ids of their responses.
            params: How to sample.

        Raises:
            ApiError: The thread is ending.
        """
        ticket = Ticket(sum(len(request.sample_ids) for request in requests))
        with self._asking:
            if self._is_stopping:
                raise ApiError(503, STOPPING)
            self._orders.put(lambda: self._submit(ticket, requests, params))
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Give up what a client has asked for; without effect where all of it has ended.

        Args:
            ticket: What `ask` returned.
        """
        if ticket.num_left:
            ticket.is_dropped = True
            self._orders.put(lambda: self._abort(ticket))

    def stop(self) -> None:
        """Give up all responses, and end."""
        self._is_stopping = True
        self._orders.put(lambda: None)

    def _run(self) -> None:
        try:
            with self._engine.serving(self._trainer):
                self._loop.call_soon_threadsafe(self._begun.set)
                while not self._is_stopping:
                    self._take_orders()
                    self._step()
        except BaseException as failure:  # noqa: BLE001 - the end of the thread; `__exit__` raises it
            self._farewell = ApiError(500, f"the engine has failed: {failure}")
            with self._asking:
                self.failure, self._is_stopping = failure, True
        self._loop.call_soon_threadsafe(self._begun.set)
        while not self._orders.empty():
            self._orders.get()()
        self._give_up(self._farewell)

    def _take_orders(self) -> None:
        """All that are there; where there is nothing else to do, wait for one."""
        while not self._under_way and not self._is_stopping:
            self._orders.get()()
        while not self._orders.empty():
            self._orders.get()()

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except Exception as error:
            # Of an engine in another process the error repeats a log, in which much may stand.
            if isinstance(error, EngineError) or not is_out_of_memory(error):
                raise
            for number in self._under_way:
                self._engine.abort(number)
            self._give_up(ApiError(503, TOO_MUCH))
        else:
            self._hand_over(deltas)

    def _submit(self, ticket: Ticket, requests: Sequence[Request], params: SamplingParams) -> None:
        if self._is_stopping:
            self._tell([(ticket, self._farewell)])
            return
        for place, request in enumerate(requests):
            number = self._engine.submit(request, params)
            self._under_way[number] = _UnderWay(ticket, place, len(request.sample_ids))

    def _abort(self, ticket: Ticket) -> None:
        for number in [number for number, one in self._under_way.items() if one.ticket is ticket]:
            self._engine.abort(number)

    def _hand_over(self, deltas: Sequence[Delta]) -> None:
        """Tell each client what a step has added to its responses."""
        by_ticket: dict[Ticket, list[Delta]] = {}
        for delta in deltas:
            one = self._under_way.get(delta.request)
            if one is None:
                continue  # given up when memory ran out
            one.num_left -= delta.finish_reason is not None
            if not one.num_left:
                del self._under_way[delta.request]
            by_ticket.setdefault(one.ticket, []).append(delta._replace(request=one.place))
        self._tell([(ticket, added) for ticket, added in by_ticket.items() if not ticket.is_dropped])

    def _give_up(self, error: Exception) -> None:
        tickets = dict.fromkeys(one.ticket for one in self._under_way.values())
        self._under_way.clear()
        self._tell([(ticket, error) for ticket in tickets])

    def _tell(self, news: Sequence[tuple[Ticket, Sequence[Delta] | Exception]]) -> None:
        def hand_out() -> None:
            for ticket, arrived in news:
                ticket.arrived.put_nowait(arrived)

        if news:
            self._loop.call_soon_threadsafe(hand_out)
