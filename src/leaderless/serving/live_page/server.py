"""Runs the live page until it is stopped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from typing_extensions import override

from leaderless.serving.api.uvicorn_config import uvicorn_config
from leaderless.serving.live_page.app import make_app
from leaderless.serving.live_page.pages import RunStore

LEAVING_S = 2
"""Longest time that browsers have to read their last answers when the server stops."""


class PageServer(uvicorn.Server):
    """Answers requests until a signal arrives. When it stops, it ends the streams of pages that are open."""

    def __init__(self, desk: RunStore, token: str | None) -> None:
        """Prepare the server without starting anything; see `make_app`."""
        self._is_closing = asyncio.Event()
        super().__init__(uvicorn_config(make_app(desk, token, self._is_closing), LEAVING_S))

    async def answer(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Answer requests until a signal arrives; `started` is called as soon as browsers can connect."""
        listener.listen(self.config.backlog)
        started()
        await self.serve(sockets=[listener])

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_closing.set()
        await super().shutdown(sockets)
