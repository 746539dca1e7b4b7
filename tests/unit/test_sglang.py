"""Requests to SGLang that a stand-in for its server cannot check."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from tests.engines import settings_of

from leaderless.rollout.apart.messages import Ask
from leaderless.rollout.child_server import ChildServer, EngineError
from leaderless.rollout.sglang import SglangServer


def server_of(child: ChildServer) -> SglangServer:
    return SglangServer("python", settings_of("model"), torch.device("cpu"), child)


def test_giving_up_a_response_names_no_other_since_all_that_begin_so_are_given_up() -> None:
    asked = list[str]()
    child = Mock(spec=ChildServer, answer_timeout_s=10.0)

    def stream(path: str, body: dict[str, list[str]]) -> Iterator[bytes]:
        asked.extend(body["rid"])
        yield b'data: {"error": "enough"}'

    child.stream = stream
    driver = server_of(child)
    driver.submit([Ask(number, [1], 4, 1.0, 1.0, 0, 0.0, 0, ()) for number in (1, 10, 12, 100)])
    with pytest.raises(EngineError, match="enough"):
        driver.step()
    driver.abort([1])
    path, body = child.call.call_args.args
    assert path == "/abort_request"
    assert [name for name in asked if name.startswith(body["rid"])] == asked[:1]


def test_the_token_is_not_on_the_command_line_which_all_users_can_read() -> None:
    child = Mock(spec=ChildServer, port=1, token="secret")
    driver = server_of(child)
    driver.start()
    command, greeting = child.start.call_args.args
    assert not [part for part in command if "secret" in part]
    assert greeting == "secret"
