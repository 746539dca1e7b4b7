"""Stand-in for the client of OpenEnv 0.10, without its network: a server is an object here.

It has the calls that the adapter uses, sends the messages that the package sends, and raises its errors.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

from openenv.core.client_types import StepResult

SERVERS: dict[str, Server] = {}
"""Servers that can be reached, by address."""


class Session(Protocol):
    is_closed: bool

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Server(Protocol):
    def connect(self) -> Session: ...


class GenericEnvClient:
    def __init__(
        self,
        base_url: str,
        connect_timeout_s: float = 10.0,
        message_timeout_s: float = 60.0,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.base_url, self.headers = base_url, headers
        self._ws: Session | None = None

    async def _connect_async(self) -> GenericEnvClient:
        if self._ws is None or self._ws.is_closed:
            if self.base_url not in SERVERS:
                raise ConnectionError(f"Failed to connect to {self.base_url}/ws: [Errno 111] Connect call failed")
            self._ws = SERVERS[self.base_url].connect()
        return self

    async def _send_and_receive(self, message: dict[str, Any]) -> dict[str, Any]:
        await self._connect_async()
        assert self._ws is not None
        response = await self._ws.answer(json.loads(json.dumps(message)))
        if response.get("type") == "error":
            data = response.get("data", {})
            raise RuntimeError(
                f"Server error: {data.get('message', 'Unknown error')} (code: {data.get('code', 'UNKNOWN')})"
            )
        return response

    async def reset(self, **kwargs: Any) -> object:
        response = await self._send_and_receive({"type": "reset", "data": kwargs})
        return self._parse_result(response.get("data", {}))

    async def step(self, action: dict[str, Any]) -> object:
        response = await self._send_and_receive({"type": "step", "data": action})
        return self._parse_result(response.get("data", {}))

    async def state(self) -> object:
        return (await self._send_and_receive({"type": "state"})).get("data", {})

    async def close(self) -> None:
        if self._ws is not None:
            self._ws.close()

    def _parse_result(self, payload: dict[str, Any]) -> object:
        return StepResult(payload.get("observation", {}), payload.get("reward"), payload.get("done", False))
