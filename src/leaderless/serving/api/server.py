"""Life cycle of the server: how it starts and stops."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from typing_extensions import override

from leaderless.run.standalone_model import Served
from leaderless.serving.api.app import make_app
from leaderless.serving.api.engine_thread import EngineHost
from leaderless.serving.api.uvicorn_config import uvicorn_config


class ModelServer(uvicorn.Server):
    """Answers requests until a signal arrives or the engine fails.

    When it stops, it cancels unfinished responses before it waits for clients to disconnect.
    """

    def __init__(self, served: Served, token: str | None) -> None:
        """Prepare the server without starting anything; see `make_app` for the token."""
        self._host = EngineHost(served.serving)
        super().__init__(uvicorn_config(make_app(served, self._host, token)))

    async def answer(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Answer requests until `should_exit` is set, or raise the error with which the engine failed.

        The listener is closed at the end; `started` is called as soon as clients can connect.
        """
        with self._host:
            if await self._host.begun():
                listener.listen(self.config.backlog)
                started()
                await self.serve(sockets=[listener])

    @override
    async def on_tick(self, counter: int) -> bool:
        """Also stop when the host is stopping."""
        return await super().on_tick(counter) or self._host.is_stopping

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._host.stop()
        await super().shutdown(sockets)
