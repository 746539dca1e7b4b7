"""Clients, and the results that they have asked for."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from leaderless.serving.http_server import ApiError
from leaderless.serving.training.turns import Failure, Lane, Promise, Result

KEPT = 4096
"""Most results of a client that are kept, for it to ask again."""
KEPT_BYTES = 1 << 28
"""Most bytes of requests of a client that have not ended."""
RETRY_S = 1
"""Seconds after which a client that sends too much is to ask again."""


class TooManyRequestsError(ApiError):
    """A client has sent more than it may."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, code="rate_limit_exceeded")


@dataclass(eq=False)
class Answer:
    """A promise, and the clients that wait for its result."""

    promise: Promise
    num_bytes: int
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class ClientSession:
    """A client, from its first request until it ends or is silent for too long.

    Attributes:
        session_id: Name, which the server has chosen.
        max_waiting: Most requests that have not ended.
        user_metadata: Texts of the client.
        lanes: Its adapters and samplers by name.
        last_seen: Time of its last sign of life.
        display_name: Name for people.
    """

    session_id: str
    max_waiting: int
    user_metadata: Mapping[str, object] = field(default_factory=dict)
    lanes: OrderedDict[str, Lane] = field(default_factory=OrderedDict)
    last_seen: float = field(default_factory=time.monotonic)
    display_name: str | None = None
    _answers: OrderedDict[str, Answer] = field(default_factory=OrderedDict)
    _num_open: int = 0
    _open_bytes: int = 0

    def see(self) -> None:
        """Note a sign of life."""
        self.last_seen = time.monotonic()

    def ask(
        self, request_id: str, digest: str, num_bytes: int, begin: Callable[[Promise], None], *, is_due: bool = False
    ) -> Promise:
        """The promise for a request, which begins unless it came before.

        Args:
            request_id: Name of the request.
            digest: Digest of its content.
            num_bytes: Its size.
            begin: Function that hands the promise to who carries it out.
            is_due: Whether others wait for it, so that it must be taken however many there are.

        Raises:
            ApiError: Another request came with the same name, or there are too many.
        """
        self.see()
        if (known := self._answers.get(request_id)) is not None:
            if known.promise.digest != digest:
                message = (
                    f"request {request_id} has been asked for with other content: does another client use this name?"
                )
                raise ApiError(400, message)
            return known.promise
        if not is_due and (self._num_open >= self.max_waiting or self._open_bytes + num_bytes > KEPT_BYTES):
            raise TooManyRequestsError(
                f"{self._num_open} requests of this client, of {self._open_bytes:,} bytes, have not ended, and "
                f"{self.max_waiting} may wait: collect results, and ask again"
            )
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self._settled, answer)

        promise = Promise(request_id, digest, tell)
        answer = Answer(promise, num_bytes)
        self._answers[request_id] = answer
        self._num_open, self._open_bytes = self._num_open + 1, self._open_bytes + num_bytes
        begin(promise)
        return promise

    def _settled(self, answer: Answer) -> None:
        self._num_open, self._open_bytes = self._num_open - 1, self._open_bytes - answer.num_bytes
        answer.settled.set()
        self._answers.move_to_end(answer.promise.request_id)
        while len(self._answers) - self._num_open > KEPT:
            oldest = next(name for name, one in self._answers.items() if one.settled.is_set())
            del self._answers[oldest]

    async def result(self, request_id: str, wait_s: float) -> Result | Failure | None:
        """The outcome of a request, once it is there; None if it is not after some time.

        Raises:
            ApiError: There is no such request, or its result is no longer kept.
        """
        self.see()
        answer = self._answers.get(request_id)
        if answer is None:
            raise ApiError(410, f"the result of request {request_id} is not kept any more, or it was never asked for")
        try:
            await asyncio.wait_for(answer.settled.wait(), wait_s)
        except TimeoutError:
            return None
        self.see()
        return answer.promise.outcome

    def knows(self, request_id: str) -> bool:
        """Whether a request has come, and its result is still kept."""
        return request_id in self._answers

    def promise(self, request_id: str) -> Promise | None:
        """The promise for a request that has not ended."""
        answer = self._answers.get(request_id)
        return None if answer is None or answer.settled.is_set() else answer.promise
