"""Life cycle of the server: where it listens and how it stops."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import uvicorn

from leaderless.config import RecipeError
from leaderless.serve.app import make_app
from leaderless.serve.host import EngineHost
from leaderless.serve.load import Served

LEAVING_S = 5
"""Longest time that clients have to read their last responses when the server stops."""


def take_port(host: str, port: int, token: str | None) -> socket.socket:
    """Reserve a port, 0 for any, without accepting connections yet. Without a token no other machine may reach it.

    Raises:
        RecipeError: There is no such interface, the port is taken, or there is no token.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if token is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise RecipeError.at(
                f"--host {host}",
                "can be reached from other machines, so clients need a token: set LEADERLESS_TOKEN to one",
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = f"cannot be listened to: {error.strerror}; take another --port (0 for any) or --host"
        raise RecipeError.at(f"--host {host} --port {port}", reason) from error
    return listener


class ModelServer(uvicorn.Server):
    """Answers requests until a signal arrives or the engine fails.

    When it stops, it cancels unfinished responses before it waits for clients to disconnect.
    """

    def __init__(self, served: Served, token: str | None) -> None:
        """Prepare the server without starting anything; see `make_app` for the token."""
        self._host = EngineHost(served.serving)
        super().__init__(
            uvicorn.Config(
                make_app(served, self._host, token),
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=LEAVING_S,
            )
        )

    async def answer(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Answer requests until `should_exit` is set, or raise the error with which the engine failed.

        The listener is closed at the end; `started` is called as soon as clients can connect.
        """
        with self._host:
            if await self._host.begun():
                listener.listen(self.config.backlog)
                started()
                await self.serve(sockets=[listener])

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server`; returns whether to stop."""
        return await super().on_tick(counter) or self._host.is_stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        self._host.stop()
        await super().shutdown(sockets)
