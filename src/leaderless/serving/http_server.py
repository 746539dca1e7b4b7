"""Common parts of all servers: how uvicorn is run, who is answered, errors, and bodies of requests and responses."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlsplit

import uvicorn
from pydantic_core import from_json, to_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from leaderless.base.values import Json

Result = TypeVar("Result")
LEAVING_S = 5
"""Longest time that clients have to read their last answers when a server stops."""
MAX_BODY_BYTES = 1 << 26
"""Largest size of a request; no prompt that fits a model is as long."""
STOPPING = "the server is stopping: ask again when it is back"


class WebServer(uvicorn.Server):
    """Uvicorn as it is run here: it logs nothing, and waits for clients a limited time when it stops."""

    def __init__(self, app: ASGIApp, leaving_s: int = LEAVING_S) -> None:
        """Prepare the server without starting anything."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=leaving_s,
            )
        )

    async def answer(self, listener: socket.socket, started: Callable[[], None]) -> None:
        """Answer requests until a signal arrives; `started` is called as soon as clients can connect."""
        listener.listen(self.config.backlog)
        started()
        await self.serve(sockets=[listener])


class QuietServer(WebServer):
    """A server that leaves signals to the worker."""

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiError(Exception):
    """A request that cannot be answered.

    `param` is the field that is wrong, if one is; `code` is for programs, where the HTTP status does not say it all.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> dict[str, Json]:
        """Return the error in the format of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Guard:
    """Accepts clients with the token; without a token, clients that address this machine as itself.

    A web page in a browser may send requests to a server on the same machine. Requests that browsers send without a
    preflight are not JSON, and a page whose domain name resolves to this machine sends that name with the request. Both
    are refused.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        error = self._objection(scope) if scope["type"] == "http" else None
        app = self._app if error is None else _to_response(error)
        await app(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._token is None:
            name = headers.get("host", "")
            if not is_this_machine(name):
                return ApiError(403, f"host '{name}' is not this machine, and the server was started without a token")
        elif scope["path"] != "/health" and not has_key(headers, self._token):
            return ApiError(401, "the token is missing or wrong: send it as the API key", code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if scope["method"] == "POST" and kind != "application/json":
            return ApiError(415, f"content-type='{kind}' must be application/json")
        return None


def is_this_machine(name: str) -> bool:
    """Check whether a name in a request is this machine's own; an address cannot be made to point elsewhere."""
    try:
        host = urlsplit(f"//{name}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def has_key(headers: Headers, key: str) -> bool:
    """Check whether a request comes with an API key."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), key.encode())


async def read_body(request: Request, most: int = MAX_BODY_BYTES) -> bytes:
    """Read the body of a request up to a size limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ApiError(413, f"the request has more than {most:,} bytes: send less at once")
    return bytes(body)


def parse_body(body: bytes, *, allow_inf_nan: bool = False) -> Json:
    """The JSON in the body of a request."""
    try:
        found: Json = from_json(body, allow_inf_nan=allow_inf_nan)
    except ValueError as error:
        raise ApiError(400, f"the body of the request is not JSON: {error}") from error
    return found


async def unless_gone(request: Request, work: Coroutine[None, None, Result]) -> Result | None:
    """The result of work for a client; None if the client disconnects, which cancels the work."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


def reply_with(reply: Json | None) -> Response:
    """A reply as a response; None for a client that has gone, which reads nothing."""
    if reply is None:
        return Response(status_code=499)
    return Response(serialized(reply), media_type="application/json")


class EventStream(StreamingResponse):
    """A response as server-sent events."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


def event(reply: Json) -> bytes:
    """Write a reply as a server-sent event."""
    return b"data: " + serialized(reply) + b"\n\n"


def serialized(reply: Json) -> bytes:
    """Write a reply as JSON."""
    return to_json(reply, inf_nan_mode="null")  # JSON has no other name for the log-probability of a broken model


async def health(request: Request) -> Response:  # noqa: ARG001
    """Report that requests are answered."""
    return JSONResponse({"status": "ok"})


async def _refuse(request: Request, error: Exception) -> Response:
    """Answer a request that was refused, that has no endpoint, or on which the server has failed."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"{type(error).__name__} in the server; its log says where")
    return _to_response(error)


HANDLERS = dict.fromkeys((ApiError, HTTPException, Exception), _refuse)
"""Handlers of errors, for an application."""


def _to_response(error: ApiError) -> Response:
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.to_json(), error.status, headers)
