"""An engine that was started elsewhere: how it is found, what it is sent, and who may use it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import HTTPServer
from typing import Any

import pytest
import torch
from tests.engines import settings_of
from torch import Tensor

from leaderless.config.rollout import ExternalConfig, RolloutConfig
from leaderless.distributed.remote import elsewhere as client
from leaderless.distributed.remote.elsewhere import ServerElsewhere
from leaderless.distributed.remote.messages import Ask, Gain, Settings, bind
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights.buckets import PackedWeight, checksum
from leaderless.distributed.weights.stream import WeightStream
from leaderless.planner.engines import choose_engine
from leaderless.rollout.external.vllm_engine import VllmElsewhere
from leaderless.rollout.external.vllm_process import elsewhere as server

TOKEN = "secret"
ASK = Ask(1, [5, 6], 3, 1.0, 1.0, 0, 0.0, 7, [2])


class Engine:
    """Stands in for vLLM: it keeps weights, and answers a request with one token for each token of the prompt."""

    made: list[Settings]

    def __init__(self, settings: Settings) -> None:
        self.made.append(settings)
        self.weights, self.sums, self.asks = dict[str, Tensor](), list[int](), list[Ask]()

    def start(self) -> None:
        if self.made[-1].model == "wrong":
            raise ValueError("there is no such model")

    def load_bucket(
        self, weights: Sequence[PackedWeight], data: Tensor, adapter: str, *, is_checked: bool = False
    ) -> None:
        assert (adapter, is_checked) == ("", True)
        own = data.clone()
        self.sums.append(checksum(own))
        self.weights |= {weight.name: weight.view(own) for weight in weights}

    def finish_load(self, policy_version: int, adapter: str, expected: Sequence[int]) -> None:
        assert (adapter, [*expected]) == ("", self.sums)
        self.version = policy_version

    def submit(self, asks: Iterator[Ask]) -> None:
        self.asks += asks

    def step(self) -> list[Gain]:
        return [Gain(ask.id, [*ask.prompt], [-0.5] * len(ask.prompt), "stop", self.version) for ask in self.asks]


class Served(server._Elsewhere):
    ends: int

    def _end(self) -> None:
        """Stands for the end of the process, and the start of the next one."""
        type(self).session, type(self).ends = "", self.ends + 1


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(server, "VllmWorker", Engine)
    monkeypatch.setattr(Engine, "made", [], raising=False)
    monkeypatch.setattr(Served, "ends", 0, raising=False)
    monkeypatch.setattr(client, "POLL_S", 0.02)
    made: HTTPServer = bind(0, Served, TOKEN)
    Served.session = ""
    made.server_activate()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield int(made.server_address[1])
    threading.Thread(target=made.shutdown, daemon=True).start()  # a call of a failed test would be waited for
    made.server_close()


def calls(port: int, token: str = TOKEN, start_timeout_s: float = 20.0) -> ServerElsewhere:
    return ServerElsewhere("the engine", f"127.0.0.1:{port}", token, start_timeout_s, 20.0, lambda: None)


def engine(port: int) -> VllmElsewhere:
    return VllmElsewhere(settings_of("model"), torch.device("cpu"), calls(port))


def test_weights_and_requests_arrive_as_they_were_sent(port: int) -> None:
    driver = engine(port)
    driver.start()
    assert [replace(made, expert_layers=()) for made in Engine.made] == [settings_of("model")]
    torch.manual_seed(0)
    weights = {f"weight {number}": torch.randn(number, 7) for number in range(1, 40)}
    driver.load(WeightStream(iter(weights.items()), 3))
    assert Served.worker.weights.keys() == weights.keys()  # type: ignore[attr-defined]
    for name, weight in Served.worker.weights.items():  # type: ignore[attr-defined]
        assert torch.equal(weight, weights[name]), name
    driver.submit([ASK])
    assert driver.step() == [Gain(1, [5, 6], [-0.5, -0.5], "stop", 3)]
    driver.close()
    assert Served.ends == 1, "it is free for another rank"
    driver.close()
    assert Served.ends == 1


def test_a_call_that_is_sent_again_is_carried_out_once(port: int) -> None:
    driver = engine(port)
    driver.start()
    driver.submit([ASK])
    kept = driver._server._kept
    assert kept is not None
    kept.sock.shutdown(socket.SHUT_RDWR)
    driver.submit([replace(ASK, id=2)])
    assert len(Served.worker.asks) == 2  # type: ignore[attr-defined]
    driver.close()


def test_an_engine_is_new_for_each_rank_and_serves_none_of_before(port: int) -> None:
    first, second = engine(port), engine(port)
    first.start()
    first._server.hang_up()  # its process is gone, and could not say so
    second.start()
    assert (Served.ends, len(Engine.made)) == (1, 2), "in a process of its own"
    second._server.hang_up()
    with pytest.raises(EngineError, match="this engine was started by another rank, or anew"):
        first.submit([ASK])
    first._server.hang_up()
    second.submit([ASK])
    second.close()


def test_an_engine_that_cannot_be_started_is_no_reason_to_wait(port: int) -> None:
    with pytest.raises(EngineError, match=r"the engine at 127.* answered /start with 500: .*there is no such model"):
        VllmElsewhere(settings_of("wrong"), torch.device("cpu"), calls(port)).start()
    with pytest.raises(EngineError, match=r"answered /start with 401: .*wrong token"):
        VllmElsewhere(settings_of("model"), torch.device("cpu"), calls(port, "other")).start()


def test_an_engine_that_comes_up_late_is_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = int(probe.getsockname()[1])
    message = r"did not start within rollout.external.start_timeout_s=0.2 s: see what `leaderless engine` prints there"
    with pytest.raises(EngineError, match=message):
        calls(free, start_timeout_s=0.2).start({})
    late = calls(free)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            late.port = port

    monkeypatch.setattr(client.time, "sleep", wait)
    late.start({**vars(settings_of("model"))})
    assert len(waits) == 3
    late.close()


def test_an_engine_that_always_breaks_off_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "POLL_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            for _ in range(2 * client.MOST_BROKEN):  # each call is sent twice
                listener.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(EngineError, match="broke off at /start"):
            calls(int(listener.getsockname()[1])).start({})
        thread.join(10)
        assert not thread.is_alive()


def test_signs_of_life_are_given_while_an_engine_starts(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    done = threading.Event()
    monkeypatch.setattr(Engine, "start", lambda _: done.wait(10))

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            done.set()

    server_calls = ServerElsewhere("the engine", f"127.0.0.1:{port}", TOKEN, 20.0, 20.0, beat)
    body: dict[str, Any] = {**vars(settings_of("model"))}
    server_calls.start(body)
    assert len(beats) >= 3
    server_calls.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"addresses": ["host"]}, "'host' must be HOST:PORT, where `leaderless engine` listens"),
        ({"addresses": ["http://host:1"]}, "must be HOST:PORT"),
        ({"addresses": ["a:1", "b:1", "a:1"]}, "'a:1' is named twice: an engine serves one rank"),
        ({"addresses": ["a:1"], "python": "/opt/python"}, "leave out one of both"),
    ],
)
def test_addresses_are_hosts_with_ports(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExternalConfig(**given)
    assert choose_engine(RolloutConfig(external=ExternalConfig(addresses=("a:1",)))) == "vllm"
    places = [ExternalConfig(), ExternalConfig(addresses=("a:1",)), ExternalConfig(python="/opt/python")]
    assert [one.is_in_process for one in places] == [True, False, False]
