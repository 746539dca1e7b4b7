"""Clients that leave or ask too much do not hurt others."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from tests.unit.serving.api.sites import DEADLINE_S, TalkingSite, talking

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 50}
PATHS = ["/v1/chat/completions", "/v1/messages"]


def await_true(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def leave(site: TalkingSite, path: str, *, stream: bool) -> None:
    """Ask, and leave when the first token has been sampled."""
    connection = http.client.HTTPConnection(site.url.split("/")[2], timeout=DEADLINE_S)
    site.engine.in_step.clear()
    connection.request("POST", path, json.dumps({**CHAT, "stream": stream}), {"content-type": "application/json"})
    if stream:
        assert connection.getresponse().read(6) in {b"data: ", b"event:"}
    assert site.engine.in_step.wait(DEADLINE_S)
    connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_one_line_in_the_log(
    path: str, stream: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with talking(lambda _: "word " * 30) as site:
        site.engine.before_step = lambda: time.sleep(0.02)
        leave(site, path, stream=stream)
        await_true(lambda: site.lines)
        assert site.openai.chat.completions.create(**CHAT).choices, "others are answered"  # type: ignore[call-overload]
        (line,) = site.lines
        assert line.startswith(f"POST {path}: the client has left after ")
        assert site.engine.aborted == [1]
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_too_many_requests_are_refused_and_the_others_answered() -> None:
    with talking(lambda _: "word", max_waiting=2) as site:
        site.engine.may_step.clear()
        streams = [site.openai.chat.completions.create(**CHAT, stream=True) for _ in range(2)]  # type: ignore[call-overload]
        with pytest.raises(openai.RateLimitError, match="2 responses are waited for") as caught:
            site.openai.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")
        asked: Any = CHAT
        with pytest.raises(anthropic.RateLimitError, match="more than 2") as refused:
            site.anthropic.messages.create(**asked)
        assert refused.value.type == "rate_limit_error"
        site.engine.may_step.set()
        for stream in streams:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "word"
        assert site.openai.chat.completions.create(**CHAT).choices  # type: ignore[call-overload]
        assert site.openai.chat.completions.create(**CHAT, n=9).choices, "alone it is not too much"  # type: ignore[call-overload]


def test_a_client_that_leaves_before_the_end_of_its_request_is_no_error(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with talking(lambda _: "word") as site:
        host, port = site.url.split("/")[2].split(":")
        for path in PATHS:
            with socket.create_connection((host, int(port))) as connection:
                head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                connection.sendall(f"{head}content-length: 100\r\n\r\n{{".encode())
        assert site.openai.chat.completions.create(**CHAT).choices, "others are answered"  # type: ignore[call-overload]
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
