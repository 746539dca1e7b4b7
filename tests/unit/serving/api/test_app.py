"""Who may connect, and what a server answers when it ends; without a network."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.types import ASGIApp, Message
from tests.unit.serving.api.engines import ScriptedEngine, ScriptedServing

import leaderless
from leaderless.config import RecipeError
from leaderless.data.prompts.encode import Tokenizer
from leaderless.run.standalone_model import Served
from leaderless.serving.api.app import ModelServer, make_app
from leaderless.serving.api.engine_thread import EngineHost
from leaderless.serving.http_server import MAX_BODY_BYTES
from leaderless.serving.listen import take_port

SERVED = Served("m", Mock(spec=Tokenizer, chat_template=None), 10, 20, ScriptedServing(ScriptedEngine()))
ASK = b'{"model": "m", "prompt": [1]}'


def ask(app: ASGIApp, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, str]:
    """Status and text of the response."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "query_string": b"", "root_path": ""}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]).decode()


def app(token: str | None = None) -> ASGIApp:
    return make_app(SERVED, EngineHost(SERVED.serving), token)


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer secre", "Bearer secret2", "Basic secret", "Bearer s\xe9cret"])
def test_without_the_token_nothing_is_answered_but_health(given: str) -> None:
    status, text = ask(app("secret"), "GET", "/v1/models", {"host": "far.example", "authorization": given})
    assert status == 401
    assert json.loads(text)["error"]["code"] == "invalid_api_key"
    assert ask(app("secret"), "GET", "/health", {"host": "far.example"}) == (200, '{"status":"ok"}')


def test_with_the_token_a_host_of_any_name_is_answered() -> None:
    headers = {"host": "far.example", "authorization": "Bearer secret"}
    assert ask(app("secret"), "GET", "/v1/models", headers)[0] == 200


@pytest.mark.parametrize(
    ("name", "status"),
    [
        *(("localhost", 200), ("localhost:80", 200), ("127.0.0.1:8000", 200), ("127.0.1.1", 200), ("[::1]:8000", 200)),
        *(("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403), ("", 403)),
        *(("10.0.0.1:8000", 403), ("[::2]", 403), ("[::1", 403), ("127.0.0.1.evil.example", 403)),
    ],
)
def test_a_server_without_a_token_answers_who_means_this_machine(name: str, status: int) -> None:
    assert ask(app(), "GET", "/v1/models", {"host": name})[0] == status


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_page_in_a_browser_can_send_unasked_is_refused(kind: str) -> None:
    status, text = ask(app(), "POST", "/v1/completions", {"host": "localhost", "content-type": kind}, ASK)
    assert status == 415
    assert "must be application/json" in text


def test_a_request_without_end_is_refused() -> None:
    headers = {"host": "localhost", "content-type": "application/json; charset=utf-8"}
    assert ask(app(), "POST", "/v1/completions", headers, b" " * (MAX_BODY_BYTES + 1))[0] == 413


def test_errors_are_in_the_words_of_the_api() -> None:
    local = {"host": "localhost", "content-type": "application/json"}
    for method, path, body, status, words in (
        ("GET", "/v1/nothing", b"", 404, "Not Found"),
        ("GET", "/v1/models/other", b"", 404, "model 'other' is not served here, only 'm'"),
        ("POST", "/v1/completions", ASK.replace(b'"m"', b'"other"'), 404, "model 'other' is not served here"),
        (
            "POST",
            "/v1/completions",
            ASK.replace(b"[1]", str([[1]] * 513).encode() + b', "n": 128'),
            400,
            "n=128 are more",
        ),
        ("POST", "/v1/completions", ASK.replace(b"[1]", b"[1, 10]"), 400, "knows 10 tokens"),
        ("POST", "/v1/completions", ASK.replace(b"[1]", b"[[1], []]"), 400, "prompt is empty"),
        ("POST", "/v1/completions", ASK.replace(b"[1]", str([1] * 20).encode()), 400, "may have 20 together"),
        ("POST", "/v1/completions", ASK.replace(b"[1]", b"[[1], [1, 1, 1, 1, 1]]"), 400, "ask for at most 15"),
        (
            "POST",
            "/v1/chat/completions",
            b'{"model": "m", "messages": [{"role": "user", "content": "a"}]}',
            400,
            "no chat",
        ),
    ):
        given, text = ask(app(), method, path, local, body)
        assert given == status, text
        assert words in json.loads(text)["error"]["message"]


def test_a_response_does_not_wait_for_its_head_to_be_confirmed() -> None:
    with take_port("127.0.0.1", 0, None) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_other_machines_are_listened_to_only_with_a_token() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(RecipeError, match="so clients need a token: set LEADERLESS_TOKEN"):
            take_port(host, 0, None)
    for host, token in (("0.0.0.0", "secret"), ("127.0.0.1", None), ("localhost", None)):
        with take_port(host, 0, token) as listener:
            assert listener.getsockname()[1] > 0


def test_a_port_that_is_taken_and_a_host_that_is_not_there_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RecipeError, match=f"--port {port}: cannot be listened to: .*in use"):
            take_port("127.0.0.1", port, None)
    with pytest.raises(RecipeError, match=r"--host nowhere\.invalid"):
        take_port("nowhere.invalid", 0, None)


def test_web_libraries_are_imported_for_serving_only() -> None:
    source = Path(leaderless.__file__).parent
    users = {
        file.relative_to(source).parts[0]
        for file in source.rglob("*.py")
        if re.search(r"(import|from) (starlette|uvicorn)", file.read_text())
    }
    assert users == {"serving"}


def test_a_server_ends_when_its_engine_fails() -> None:
    engine = ScriptedEngine()

    def fail() -> None:
        raise RuntimeError("the device is gone")

    engine.before_step = fail
    served = Served("m", SERVED.tokenizer, 10, 20, ScriptedServing(engine))
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def client(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}content-length: {len(ASK)}\r\n\r\n".encode() + ASK)
        try:
            return await reader.read()
        finally:
            writer.close()

    async def run() -> None:
        listener = take_port("127.0.0.1", 0, None)
        asking: list[asyncio.Task[bytes]] = []
        port = listener.getsockname()[1]
        try:
            await ModelServer(served, None).answer(listener, lambda: asking.append(asyncio.create_task(client(port))))
        finally:
            assert b"the engine has failed: the device is gone" in await asking[0]

    with pytest.raises(RuntimeError, match="the device is gone"):
        asyncio.run(asyncio.wait_for(run(), 20))
