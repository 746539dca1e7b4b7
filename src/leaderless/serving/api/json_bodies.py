"""Bodies of requests and responses, and errors as responses."""

from __future__ import annotations

from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from leaderless.base.values import Json
from leaderless.serving.api.auth import to_response
from leaderless.serving.api.errors import ApiError

MAX_BODY_BYTES = 1 << 26
"""Largest size of a request; no prompt that fits a model is as long."""


def event(reply: Json) -> bytes:
    """Write a reply as a server-sent event."""
    return b"data: " + serialized(reply) + b"\n\n"


def serialized(reply: Json) -> bytes:
    """Write a reply as JSON."""
    return to_json(reply, inf_nan_mode="null")  # JSON has no other name for the log-probability of a broken model


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


async def refuse(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Answer a request that was refused."""
    assert isinstance(error, ApiError)
    return to_response(error)


async def refuse_http(request: Request, error: Exception) -> Response:
    """Answer a request that has no endpoint."""
    assert isinstance(error, HTTPException)
    return to_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


async def fail(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Answer a request on which the server has failed."""
    return to_response(ApiError(500, f"{type(error).__name__} in the server; its log says where"))
