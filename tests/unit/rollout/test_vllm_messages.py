"""Messages between a rank and a server with vLLM, for which a stand-in samples: how many, and each token once."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.engines import make_external, server_of, settings_of
from tests.tiny import tiny_model

from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.messages import NUMBER, Gain, bind, from_columns, joined, to_columns
from leaderless.rollout.engine import TOKENS_AT_ONCE, Completion, Request, RolloutEngine, SamplingParams, generate
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.vllm_engine import VllmServer
from leaderless.rollout.external.vllm_process import server as apart
from leaderless.rollout.external.vllm_process.worker import VllmWorker
from leaderless.rollout.wrapped_engine import _Witness
from leaderless.worker.asynchronous.in_flight import at_once

REQUESTS = [Request([3 + number], [10 * number, 10 * number + 1]) for number in range(5)]
PARAMS = SamplingParams(SamplingConfig(), 40)
PLACES = 4
"""Responses that the stand-in samples at the same time; the others wait."""


@dataclass
class StandIn:
    """vLLM, as far as a worker calls it: tokens follow from the seed of a response and from their place in it."""

    delay_s: float = 0.0
    num_steps: int = 0
    aborted: list[str] = field(default_factory=list)
    _open: dict[str, SimpleNamespace] = field(default_factory=dict)
    _grown: dict[str, int] = field(default_factory=dict)

    def add_request(
        self, name: str, prompt: Mapping[str, list[int]], params: SimpleNamespace, lora_request: object
    ) -> str:
        assert prompt["prompt_token_ids"]
        assert lora_request is None
        self._open[name], self._grown[name] = params, 0
        return name

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def abort_request(self, names: Sequence[str]) -> None:
        self.aborted += names
        for name in names:
            self._open.pop(name, None)

    def step(self) -> list[SimpleNamespace]:
        self.num_steps += 1
        time.sleep(self.delay_s)
        return [self._grow(name, params) for name, params in list(self._open.items())[:PLACES]]

    def _grow(self, name: str, params: SimpleNamespace) -> SimpleNamespace:
        noise = Random(f"{params.seed}/{self._grown[name]}")
        token = 0 if noise.random() < 0.03 else noise.randrange(1, 60)
        self._grown[name] += 1
        ends = "stop" if token in params.stop_token_ids else "length"
        reason = ends if ends == "stop" or self._grown[name] == params.max_tokens else None
        if reason:
            del self._open[name]
        scores = [{token: SimpleNamespace(logprob=-noise.random())}]
        part = SimpleNamespace(token_ids=[token], logprobs=scores, finish_reason=reason)
        return SimpleNamespace(
            request_id=name, prompt_token_ids=None, outputs=[part], finished=bool(reason), num_cached_tokens=7
        )


@dataclass
class Served:
    """An engine whose vLLM is a stand-in behind a server, with what has passed between them."""

    engine: ExternalEngine
    stand_in: StandIn
    server: ChildServer
    calls: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # that vLLM has taken at each message with tokens
    connections: list[object] = field(default_factory=list)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Serve stand-ins; `cut` says what to leave out of the answers, by their numbers from 0."""
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(sys.modules["vllm"], "TokensPrompt", dict, raising=False)
    monkeypatch.setattr(sys.modules["vllm.sampling_params"], "RequestOutputKind", Mock(), raising=False)
    ends: list[Callable[[], None]] = []

    def start(stand_in: StandIn | None = None, cut: Callable[[int], slice | None] = lambda _: None) -> Served:
        worker = VllmWorker(settings_of(tiny_model()))
        worker._llm, worker._versions = stand_in or StandIn(), {"": 3}  # type: ignore[assignment]
        child = server_of("vllm", tmp_path, answer_timeout_s=20.0)
        child.prepare()
        external = make_external(VllmServer("", worker.settings, torch.device("cpu"), child))
        external._is_started, external._is_awake, external.policy_version = True, True, 3
        served = Served(external, worker._engine, child)  # type: ignore[arg-type]
        num_sent = 0

        class Watched(apart.EngineHandler):
            def setup(self) -> None:
                super().setup()
                served.connections.append(self)

            def answer(self, name: str, body: Mapping[str, Any]) -> object:
                served.calls.append(name)
                answer = super().answer(name, body)
                if name == "step":
                    served.steps.append(served.stand_in.num_steps)
                return answer

            def _send(self, status: int, body: bytes) -> None:
                nonlocal num_sent
                part, num_sent = cut(num_sent), num_sent + 1
                if part is None:
                    super()._send(status, body)
                    return
                self.close_connection = True
                if part.stop:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body[part])

        Watched.worker = worker
        server = bind(child.port, Watched, child.token)
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def end() -> None:
            child.close()  # the server waits for the end of a connection that is kept
            server.shutdown()
            thread.join()
            server.server_close()

        ends.append(end)
        return served

    yield start
    for end in ends:
        end()


def one_by_one(engine: RolloutEngine, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
    """What `generate` returns, with steps that bring a token of each response."""
    found = {engine.submit(request, params): request.begin() for request in requests}
    while not all(one.finish_reason for group in found.values() for one in group):
        for delta in engine.step():
            found[delta.request][delta.sibling].add(delta)
    return list(found.values())


def test_many_tokens_in_a_message_are_the_tokens_of_many_messages(serve: Callable[..., Served]) -> None:
    single, many = serve(), serve()
    expected = one_by_one(single.engine, REQUESTS, PARAMS)
    assert generate(many.engine, REQUESTS, PARAMS) == expected
    num_tokens = sum(len(one.tokens) for group in expected for one in group)
    assert num_tokens > 100
    assert {one.finish_reason for group in expected for one in group} == {"stop", "length"}
    assert single.calls.count("step") == single.stand_in.num_steps
    assert many.stand_in.num_steps == single.stand_in.num_steps, "no place is empty while a response waits for it"
    assert many.calls.count("step") == ceil(many.stand_in.num_steps / TOKENS_AT_ONCE)
    assert (len(many.connections), len(single.connections)) == (1, 1)


def test_where_one_response_is_awaited_token_by_token_all_come_like_it(serve: Callable[..., Served]) -> None:
    served = serve()
    first = served.engine.submit(Request([5], [0]), replace(PARAMS, max_tokens=8, tokens_at_once=TOKENS_AT_ONCE))
    served.engine.submit(Request([5], [1]), replace(PARAMS, max_tokens=4))
    lengths = {True: 0, False: 0}
    while deltas := served.engine.step():
        for delta in deltas:
            lengths[delta.request == first] += len(delta.tokens)
    assert 1 < lengths[False] < lengths[True] - 1
    assert served.steps == [*range(1, lengths[False] + 1), lengths[True]]


def test_a_stop_text_cuts_a_response_which_is_aborted(serve: Callable[..., Served]) -> None:
    whole, cut = serve(), serve()
    ((free,),) = generate(whole.engine, [Request([5], [0])], PARAMS)
    text = cut.engine._tokenizer.decode(free.tokens[3:5])
    ((stopped,),) = generate(cut.engine, [Request([5], [0])], replace(PARAMS, stop=(text,)))
    assert free.tokens[: len(stopped.tokens)] == stopped.tokens
    assert (stopped.finish_reason, len(stopped.tokens) <= 5) == ("stop", True)
    assert cut.stand_in.num_steps == len(stopped.tokens), "nothing is sampled in vain"
    assert cut.stand_in.aborted == ["1"]


@pytest.mark.parametrize("part", [slice(0), slice(1), slice(-3)], ids=["all", "all but a byte", "the end"])
def test_an_answer_that_is_lost_is_sent_again_and_each_token_comes_once(
    serve: Callable[..., Served], part: slice
) -> None:
    expected, served = serve(), serve(cut=lambda number: part if number % 3 == 1 else None)
    assert generate(served.engine, REQUESTS, PARAMS) == generate(expected.engine, REQUESTS, PARAMS)
    assert len(served.connections) > 3
    assert served.calls == expected.calls, "no call is made twice"


def test_a_call_that_has_not_arrived_as_a_whole_is_not_made(serve: Callable[..., Served]) -> None:
    served = serve()
    served.engine.submit(Request([5], [0]), PARAMS)
    served.server.hang_up()
    body = json.dumps({"ids": [1]})
    head = f"POST /abort HTTP/1.1\r\nContent-Length: {len(body)}\r\nAuthorization: Bearer {served.server.token}\r\n"
    for sent in (head, f"{head}{NUMBER}: 2\r\n\r\n{body[:-1]}"):
        with socket.create_connection(("127.0.0.1", served.server.port)) as connection:
            connection.sendall(sent.encode())
    assert served.engine.step()
    assert served.calls == ["submit", "step"]


def test_parts_of_one_engine_take_the_same_steps_however_slow_they_are(serve: Callable[..., Served]) -> None:
    parts = [serve(), serve(StandIn(delay_s=0.003))]
    seen = []
    for part in parts:
        witness = _Witness(part.engine)
        generate(witness, REQUESTS, PARAMS)
        seen.append(witness.seen)
    assert seen[0] == seen[1]
    assert parts[0].steps == parts[1].steps
    assert len(parts[0].steps) > 2


def test_gains_are_written_in_columns() -> None:
    gains = [Gain(1, [5], [-0.1], None, 3, 7), Gain(2, [], [], "length", 3)]
    columns = to_columns(gains)
    assert from_columns(json.loads(json.dumps(columns))) == gains
    assert "experts" not in columns
    assert from_columns(to_columns([])) == []
    more = [*gains, Gain(1, [6, 0], [-0.2, -0.3], "stop", 3, 9, ["AA=="])]
    together = joined(more)
    assert together == [Gain(1, [5, 6, 0], [-0.1, -0.2, -0.3], "stop", 3, 7, ["AA=="], [], []), gains[1]]
    plain = together[0]._replace(support=(), drafts=())
    assert from_columns(json.loads(json.dumps(to_columns(together))))[0] == plain
    drafted = [Gain(1, [6], [-0.2], None, 3), Gain(1, [7], [-0.2], "stop", 3, drafts=[9, 4])]
    assert from_columns(to_columns(joined(drafted)))[0].drafts == [9, 4]
    limited = [Gain(1, [6], [-0.2], None, 3, support=["AQ=="]), Gain(1, [7], [-0.2], None, 3, support=[""])]
    assert "experts" not in to_columns(limited)
    assert from_columns(to_columns(joined(limited)))[0].support == ["AQ==", ""]


def test_responses_that_are_short_come_in_shorter_parts() -> None:
    assert [at_once(longest) for longest in (1, 63, 128, 1024, 32768)] == [1, 1, 2, TOKENS_AT_ONCE, TOKENS_AT_ONCE]
