"""Runs the live page until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn

from leaderless.serve.uvicorn_config import uvicorn_config
from leaderless.ui.app import make_app
from leaderless.ui.desk import Desk


async def answer(desk: Desk, listener: socket.socket, token: str | None, started: Callable[[], None]) -> None:
    """Answer requests until a signal arrives; `started` is called as soon as browsers can connect."""
    config = uvicorn_config(make_app(desk, token), leaving_s=0)
    listener.listen(config.backlog)
    started()
    await uvicorn.Server(config).serve(sockets=[listener])
