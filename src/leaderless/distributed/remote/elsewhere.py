"""A server that was started elsewhere, on any machine, and serves one rank at a time."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from leaderless.base.values import Json
from leaderless.distributed.remote.server_calls import EngineError, ServerCalls

STARTED = "started"
"""Answer of a server that has started what it serves."""
POLL_S = 0.5
"""Time between two signs of life, and between two tries to reach a server."""
MOST_BROKEN = 3
"""Starts that may break off: what is served ends the process where it cannot start, and is started again there."""


class ServerElsewhere(ServerCalls):
    """Calls of a server at an address. It is there before this rank needs it, and begins anew after each use.

    Args:
        name: Server in words, for errors.
        address: `HOST:PORT`.
        token: Key that it expects; empty if it needs none.
        start_timeout_s: Longest time until it is ready to serve.
        answer_timeout_s: Longest time without an answer after that.
        beat: Function that is called while it starts, as a sign of life.
    """

    def __init__(
        self,
        name: str,
        address: str,
        token: str,
        start_timeout_s: float,
        answer_timeout_s: float,
        beat: Callable[[], None],
    ) -> None:
        super().__init__(f"{name} at {address}", answer_timeout_s, "rollout.external")
        self.host, _, port = address.rpartition(":")
        self.port, self.token = int(port), token
        self._start_timeout_s, self._beat = start_timeout_s, beat
        self._has_started = False

    def start(self, settings: Json) -> None:
        """Let it start what it serves, once it can be reached.

        Raises:
            EngineError: It cannot be reached in time, it serves another rank, or what it serves cannot be started.
        """
        end, limit, num_broken = time.monotonic() + self._start_timeout_s, self.answer_timeout_s, 0
        self._session = f"{secrets.token_hex(8)}-"
        while not self._has_started:
            self.hang_up()
            self.answer_timeout_s = max(end - time.monotonic(), POLL_S)
            try:
                self._has_started = self._ask(settings) == STARTED
            except EngineError as error:
                self.hang_up()  # or nobody else could be told why
                cause = error.__cause__
                if isinstance(cause, TimeoutError) or time.monotonic() > end:
                    raise self._failed(
                        f"did not start within {self._section}.start_timeout_s={self._start_timeout_s:g} s: see what "
                        "`leaderless engine` prints there; it serves one rank at a time"
                    ) from error
                num_broken += not isinstance(cause, ConnectionRefusedError | socket.gaierror)
                if cause is None or num_broken == MOST_BROKEN:
                    raise
            finally:
                self.answer_timeout_s = limit
            if not self._has_started:  # it cannot be reached yet, or begins anew after another use
                time.sleep(POLL_S)
        assert self._kept is not None, "it has answered"
        self._kept.timeout = limit
        self._kept.sock.settimeout(limit)  # of the same connection: another rank could be served after it

    def _ask(self, settings: Json) -> Json:
        """Ask it to start, with signs of life until it answers."""
        with ThreadPoolExecutor(1, "start a server") as thread:
            asked = thread.submit(self.call_numbered, "/start", {"settings": settings})
            while not asked.done():
                self._beat()
                wait([asked], POLL_S)
            return asked.result()

    def close(self) -> None:
        """End what it serves; it is then free for another rank."""
        if self._has_started:
            self._has_started = False
            with suppress(EngineError):
                self.call_numbered("/stop", {})
        self.hang_up()
