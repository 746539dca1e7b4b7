"""Who may use the training service."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from leaderless.serving.training.app import API, PROTOBUF, KeyGuard


async def answer(_: Request) -> Response:
    return PlainTextResponse("yes")


def status(token: str | None, path: str = f"{API}/ask", host: str = "localhost", **headers: str) -> int:
    app = KeyGuard(Starlette(routes=[Route(path, answer, methods=["POST"])]), token)

    more = {name.replace("_", "-"): one for name, one in headers.items()}
    sent = {"host": host, "content-type": "application/json"} | more
    pairs = [(name.encode(), one.encode()) for name, one in sent.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": pairs}
    said: list[MutableMapping[str, object]] = []

    async def receive() -> MutableMapping[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, object]) -> None:
        said.append(message)

    asyncio.run(app(scope, receive, send))
    return int(str(said[0]["status"]))


@pytest.mark.parametrize("key", ["tml-secret", "tml-other", "secret", ""])
def test_clients_need_the_key(key: str) -> None:
    assert status("secret", x_api_key=key) == (200 if key == "tml-secret" else 401)
    assert status("secret", f"{API}/healthz", x_api_key=key) == 200


def test_without_a_key_only_this_machine_is_answered() -> None:
    assert status(None) == 200
    assert status(None, host="a.page") == 403


def test_what_a_web_page_can_send_is_refused() -> None:
    assert status(None, content_type=PROTOBUF) == 200
    assert status(None, content_type="text/plain") == 415
