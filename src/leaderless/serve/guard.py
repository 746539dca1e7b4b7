"""Who may ask."""

from __future__ import annotations

import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from leaderless.serve.errors import ApiError


class Guard:
    """Lets in who has the token; without a token, who means this machine.

    A page in a browser may send requests to a server of the same machine. What it can send without asking first is no
    JSON, and where it has a name of its own point to this machine, the name stands in the request.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        """Stand before an application.

        Args:
            app: That answers.
            token: See `make_app`.
        """
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
            if not _is_this_machine(name):
                return ApiError(403, f"host '{name}' is not this machine, and the server was started without a token")
        elif scope["path"] != "/health":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode("latin-1"), self._token):
                return ApiError(401, "the token is missing or wrong: send it as the API key", code="invalid_api_key")
        kind = headers.get("content-type", "").partition(";")[0].strip()
        if scope["method"] == "POST" and kind != "application/json":
            return ApiError(415, f"content-type='{kind}' must be application/json")
        return None


def _is_this_machine(name: str) -> bool:
    """Whether a client names this machine; an address cannot be made to point to another one."""
    try:
        host = urlsplit(f"//{name}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def to_response(error: ApiError) -> Response:
    """An error as a response.

    Args:
        error: What the client is told.
    """
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.to_json(), error.status, headers)
