"""Requests to SGLang that a stand-in for its server cannot check."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.engines import settings_of

from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.messages import Ask, Gain
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.rollout.external.sglang_engine import SglangServer

ASK = Ask(1, [7, 8], 4, 1.0, 1.0, 0, 0.0, 0, ())


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


def test_choices_of_experts_that_do_not_fit_the_tokens_are_refused() -> None:
    settings = replace(settings_of("model"), expert_layers=(1,), experts_per_token=2)
    driver = SglangServer("python", settings, torch.device("cpu"), Mock(spec=ChildServer))
    chosen = np.arange(3 * 2 * 2, dtype="<i4").tobytes()  # of 3 tokens and 2 layers, of which the first has no experts
    info = {"routed_experts": base64.b64encode(chosen).decode()}
    assert [base64.b64decode(one) for one in driver._experts(info, 3)] == [b"\2\3", b"\6\7", b"\x0a\x0b"]
    for wrong, count in ((info, 5), ({}, 3)):
        with pytest.raises(EngineError, match=rf"choices of experts for {count} tokens, of which each has 2 in every"):
            driver._experts(wrong, count)


def answers(finish: str, **facts: str) -> Iterator[bytes]:
    """The answer about one response, which has a token and ends."""
    info = {"id": "1", "weight_version": "default", "finish_reason": {"type": finish}, **facts}
    yield b"data: " + json.dumps({"meta_info": {**info, "output_token_logprobs": [[-1.0, 5, None]]}}).encode()


def events(sizes: list[int], *, repeats: bool) -> Iterator[bytes]:
    """Events about one response, after which it has these numbers of tokens: with the new ones, or with all."""
    for before, size in pairwise([0, *sizes]):
        entries = [[-float(place), 5 + place, None] for place in range(0 if repeats else before, size)]
        info = {"id": "1", "weight_version": "3", "completion_tokens": size, "output_token_logprobs": entries}
        info["finish_reason"] = {"type": "length"} if size == sizes[-1] else None
        yield b"data: " + json.dumps({"meta_info": info}).encode()


@pytest.mark.parametrize("repeats", [False, True])
def test_each_token_is_read_once_whether_or_not_an_event_repeats_earlier_ones(repeats: bool) -> None:
    child = Mock(spec=ChildServer, answer_timeout_s=10.0, stream=lambda *_: events([1, 2, 2, 4], repeats=repeats))
    driver, gains = server_of(child), list[Gain]()
    driver.submit([ASK])
    while not gains or gains[-1].finish_reason is None:
        gains += driver.step()
    assert [gain.tokens for gain in gains] == [[5], [6], [], [7, 8]]
    assert [gain.log_probs for gain in gains] == [[0.0], [-1.0], [], [-2.0, -3.0]]


def test_tokens_that_an_event_leaves_out_are_missed() -> None:
    late = islice(events([1, 2, 3], repeats=False), 1, 3)
    child = Mock(spec=ChildServer, answer_timeout_s=10.0, stream=lambda *_: late)
    driver = server_of(child)
    driver.submit([ASK])
    with pytest.raises(EngineError, match="tokens from 1 on of a response of which 0 were read"):
        driver.step()


def test_sglang_is_asked_for_new_tokens_alone() -> None:
    child = Mock(spec=ChildServer, port=1, token="secret")
    server_of(child).start()
    command, _ = child.start.call_args.args
    assert "--stream-output" in command, "else a response of n tokens takes n events of up to n tokens"


def test_a_response_has_the_experts_of_all_tokens_but_its_last_one_and_needs_none_if_it_was_aborted() -> None:
    chosen = base64.b64encode(np.arange(2 * 2 * 2, dtype="<i4").tobytes()).decode()
    settings = replace(settings_of("model"), expert_layers=(1,), experts_per_token=2)
    for said, expected in ((answers("length", routed_experts=chosen), [b"\2\3", b"\6\7"]), (answers("abort"), [])):
        child = Mock(spec=ChildServer, answer_timeout_s=10.0, stream=lambda *_, said=said: said)
        driver = SglangServer("python", settings, torch.device("cpu"), child)
        driver.submit([ASK])
        (gain,) = driver.step()
        assert [base64.b64decode(one) for one in gain.experts] == expected


def test_a_request_is_sent_with_the_adapters_of_the_time_at_which_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = list[dict[str, object]]()

    def stream(_: str, body: dict[str, object]) -> Iterator[bytes]:
        bodies.append(body)
        return answers("length")

    adapters = {role: {"r": 1} for role in ("planner", "solver")}
    settings = replace(settings_of("model"), adapters=adapters, matrices=dict.fromkeys(adapters, ()))
    driver = SglangServer("python", settings, torch.device("cpu"), Mock(spec=ChildServer, stream=stream))
    driver._versions = {"planner": 4, "solver": 9}
    driver.submit([replace(ASK, adapter="planner"), replace(ASK, id=2, adapter="solver")])
    begun = Mock()
    monkeypatch.setattr(threading.Thread, "start", begun)
    driver._send()
    begun.assert_called_once_with()
    driver._versions["planner"] = 5  # before the thread has run
    driver._streams[-1].run()
    assert bodies[0]["lora_path"] == ["planner-4", "solver-9"]
    gain = driver._news.get_nowait()
    assert isinstance(gain, Gain)
    assert gain.policy_version == 4


def test_the_token_is_not_on_the_command_line_which_all_users_can_read() -> None:
    child = Mock(spec=ChildServer, port=1, token="secret")
    driver = server_of(child)
    driver.start()
    command, greeting = child.start.call_args.args
    assert not [part for part in command if "secret" in part]
    assert greeting == "secret"
