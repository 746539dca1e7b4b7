"""Decides which clients are answered."""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from leaderless.serving.api.errors import ApiError


class Guard:
    """Accepts clients with the token; without a token, clients that address this machine as itself.

    A web page in a browser may send requests to a server on the same machine. Requests that browsers send without a
    preflight are not JSON, and a page whose domain name resolves to this machine sends that name with the request. Both
    are refused.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        error = self._objection(scope) if scope["type"] == "http" else None
        app = self._app if error is None else to_response(error)
        await app(scope, receive, send)

    def _objection(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._token is None:
            name = headers.get("host", "")
            if not is_this_machine(name):
                return ApiError(403, f"host '{name}' is not this machine, and the server was started without a token")
        elif scope["path"] != "/health":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), self._token):
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


def to_response(error: ApiError) -> Response:
    """Turn an error into a response."""
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.to_json(), error.status, headers)
