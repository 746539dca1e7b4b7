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


async def serve(
    served: Served, token: str | None, listener: socket.socket, started: Callable[[uvicorn.Server], None]
) -> None:
    """Answer requests until a signal comes, or the engine fails.

    Args:
        served: The model.
        token: That clients have to send, if any.
        listener: The port; closed in the end.
        started: Told the server, once clients can connect.

    Raises:
        BaseException: What the engine has failed with.
    """
    host = EngineHost(served.engine, served.trainer)
    config = uvicorn.Config(
        make_app(served, host, token),
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=LEAVING_S,
    )
    server = _Server(config, host)
    with host:
        listener.listen(config.backlog)
        started(server)
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends when the engine does, and gives up what is under way before it waits for clients to leave."""

    def __init__(self, config: uvicorn.Config, host: EngineHost) -> None:
        super().__init__(config)
        self._host = host

    async def on_tick(self, counter: int) -> bool:
        """Whether to end."""
        return await super().on_tick(counter) or self._host.is_ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End."""
        self._host.stop()
        await super().shutdown(sockets)
