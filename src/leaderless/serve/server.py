"""The server's life: where it listens, and how it ends."""

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
"""Longest wait, in the end, for clients to take what they are told."""


def take_port(host: str, port: int, token: str | None) -> socket.socket:
    """Take a port; nobody can connect to it yet. Other machines can reach it only where a token is asked for.

    Args:
        host: Name or address of an interface of this machine.
        port: 0 for any that is free.
        token: That clients have to send, if any.

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
    """Answers requests until a signal comes, or the engine fails.

    In the end it gives up what is under way before it waits for clients to leave.
    """

    def __init__(self, served: Served, token: str | None) -> None:
        """Nothing runs yet.

        Args:
            served: The model.
            token: That clients have to send, if any.
        """
        self._host = EngineHost(served.engine, served.trainer)
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
        """Answer requests; setting `should_exit` ends it.

        Args:
            listener: The port; closed in the end.
            started: Called when clients can connect.

        Raises:
            BaseException: What the engine has failed with.
        """
        with self._host:
            if await self._host.begun():
                listener.listen(self.config.backlog)
                started()
                await self.serve(sockets=[listener])

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server`: whether to end."""
        return await super().on_tick(counter) or self._host.is_ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        self._host.stop()
        await super().shutdown(sockets)
