"""Where a server listens."""

from __future__ import annotations

import ipaddress
import socket

from leaderless.base.tokens import TOKEN_VARIABLE
from leaderless.config import RecipeError


def address_of(listener: socket.socket) -> str:
    """Host and port of a listener, as they stand in an address."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def take_port(host: str, port: int, token: str | None, key: str = "") -> socket.socket:
    """Reserve a port, 0 for any, without accepting connections yet. Without a token no other machine may reach it.

    Args:
        host: Interface.
        port: Number; 0 for any that is free.
        token: Key that clients send; None if they need none.
        key: Section of the recipe with both; empty if they are options of a command.

    Raises:
        RecipeError: There is no such interface, the port is taken, or there is no token.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if token is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise RecipeError.at(
                f"{key}.host" if key else f"--host {host}",
                f"can be reached from other machines, so clients need a token: set {TOKEN_VARIABLE} to one",
            )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without it, the body of a response waits 40 ms for the client to confirm the head.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        if key:
            reason = f"is {port}, which cannot be listened to at {host}: {error.strerror}; take another (0 for any)"
            raise RecipeError.at(f"{key}.port", reason) from error
        reason = f"cannot be listened to: {error.strerror}; take another --port (0 for any) or --host"
        raise RecipeError.at(f"--host {host} --port {port}", reason) from error
    return listener
