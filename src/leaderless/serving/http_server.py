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
from starlette.requests import ClientDisconnect, Request
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
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_anthropic_json(self) -> dict[str, Json]:
        """Return the error in the format of Anthropic's API."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        details: dict[str, Json] = {} if self.code is None else {"details": {"error_code": self.code}}
        return {"type": "error", "error": {"type": kind, "message": self.message, **details}, "request_id": None}


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Kinds of errors in Anthropic's API that their status tells."""
_ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Ends of the paths where errors have the format of Anthropic's API."""
RETRY_AFTER_S = 1
"""Time after which clients that were refused for now may ask again."""


class Guard:
    """Accepts clients with the token; without a token, clients that address this machine as itself.

    A web page in a browser may send requests to a server on the same machine. Requests that browsers send without a
    preflight are not JSON, and a page whose domain name resolves to this machine sends that name with the request. Both
    are refused.

    Attributes:
        kinds: Types of content that requests may have.
        open_path: Path that needs no token.
    """

    kinds: tuple[str, ...] = ("application/json",)
    open_path: str = "/health"

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        error = self._objection(scope) if scope["type"] == "http" else None
        app = self._app if error is None else self.refusal(error, scope["path"])
        await app(scope, receive, send)

    def refusal(self, error: ApiError, path: str) -> Response:
        """The answer to a client that is not accepted."""
        return _to_response(error, path)

    def objection_to_key(self, headers: Headers, token: str) -> ApiError | None:
        """The error of a client that does not send the token."""
        if has_key(headers, token):
            return None
        return ApiError(401, "the token is missing or wrong: send it as the API key", code="invalid_api_key")

    def _objection(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._token is None:
            name = headers.get("host", "")
            if not is_this_machine(name):
                return ApiError(403, f"host '{name}' is not this machine, and the server was started without a token")
        elif scope["path"] != self.open_path and (error := self.objection_to_key(headers, self._token)) is not None:
            return error
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if scope["method"] == "POST" and kind not in self.kinds:
            return ApiError(415, f"content-type='{kind}' must be {' or '.join(self.kinds)}")
        return None


def is_this_machine(name: str) -> bool:
    """Check whether a name in a request is this machine's own; an address cannot be made to point elsewhere."""
    try:
        host = urlsplit(f"//{name}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def has_key(headers: Headers, key: str) -> bool:
    """Check whether a request comes with an API key, as clients of OpenAI's or of Anthropic's API send it."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = (bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""))
    return any(hmac.compare_digest(one.encode("latin-1"), key.encode()) for one in given)


async def read_body(request: Request, most: int = MAX_BODY_BYTES) -> bytes:
    """Read the body of a request up to a size limit."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise ApiError(413, f"the request has more than {most:,} bytes: send less at once")
    except ClientDisconnect as error:  # nobody reads the answer, and it is no error of the server
        raise ApiError(499, "the client has left before the end of its request") from error
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


def event(reply: Json, name: str = "") -> bytes:
    """Write a reply as a server-sent event, which may have a name."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + serialized(reply) + b"\n\n"


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
    return _to_response(error, request.url.path)


HANDLERS = dict.fromkeys((ApiError, HTTPException, Exception), _refuse)
"""Handlers of errors, for an application."""


def _to_response(error: ApiError, path: str) -> Response:
    headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": str(RETRY_AFTER_S)}}.get(error.status)
    reply = error.to_anthropic_json() if path.endswith(_ANTHROPIC_PATHS) else error.to_json()
    return JSONResponse(reply, error.status, headers)
