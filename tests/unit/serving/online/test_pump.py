"""Requests that come from another thread than the engine's, and go on where new weights have interrupted them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import torch
from tests.tiny import tiny_model
from tests.unit.rollout.test_native_engine import tiny_engine
from transformers import AutoModelForCausalLM

from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.engine import Completion, Request, SamplingParams
from leaderless.serving.http_server import ApiError
from leaderless.serving.online.request_queue import OnlineScheduler

PARAMS = SamplingParams(SamplingConfig(), 12)
Weights = dict[str, torch.Tensor]


class Clients:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def ask(self, pump: OnlineScheduler, prompt: list[int], sample_id: int) -> asyncio.Future[Completion]:
        request = Request(prompt, [sample_id])
        return asyncio.run_coroutine_threadsafe(pump.ask(request, PARAMS), self.loop)  # type: ignore[return-value]

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def clients():
    clients = Clients()
    yield clients
    clients.close()


def weights_of(change: float) -> Weights:
    """The tiny model's own weights, each a little different."""
    generator = torch.Generator().manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    return {
        name: tensor.detach() + change * torch.randn(tensor.shape, generator=generator)
        for name, tensor in model.named_parameters()
    }


def log_probs_under(weights: Weights, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of each token, by another implementation of the model, in one pass."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model()).eval()
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def questions(number: int) -> Callable[[], bool]:
    """Done after it has been asked some times."""
    left = iter(range(number))
    return lambda: next(left, None) is None


def all_done(answers: list[asyncio.Future[Completion]]) -> Callable[[], bool]:
    return lambda: all(answer.done() for answer in answers)


def until_waiting(pump: OnlineScheduler, number: int) -> None:
    """Wait until so many orders have come."""
    deadline = time.monotonic() + 10
    while len(pump._waiting) < number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def nothing() -> None: ...


def test_a_response_goes_on_with_new_weights_between_two_tokens(clients: Clients) -> None:
    pump, engine = OnlineScheduler(), tiny_engine()
    prompts = [[3, 4, 5], [6, 7, 8, 9]]
    both = {3: weights_of(0.0), 4: weights_of(0.05)}
    engine.load_weights(WeightStream(iter(both[3].items()), 3))
    answers = [clients.ask(pump, prompt, place) for place, prompt in enumerate(prompts)]
    until_waiting(pump, 2)
    pump.serve(engine, questions(5), nothing)
    assert not any(answer.done() for answer in answers)
    engine.sleep(keep_weights=False)
    engine.load_weights(WeightStream(iter(both[4].items()), 4))
    pump.serve(engine, all_done(answers), nothing)
    for prompt, answer in zip(prompts, answers, strict=True):
        found = answer.result()
        versions = found.policy_versions
        assert versions == sorted(versions)
        assert {*versions} == {3, 4}
        assert len(found.tokens) == len(found.log_probs) == len(versions)
        assert found.finish_reason in {"stop", "length"}
        for version, weights in both.items():
            places = [place for place, own in enumerate(versions) if own == version]
            expected = log_probs_under(weights, prompt, found.tokens)[places]
            assert torch.allclose(torch.tensor(found.log_probs)[places], expected, atol=1e-4)
        other = log_probs_under(both[4], prompt, found.tokens)
        assert not torch.allclose(torch.tensor(found.log_probs), other, atol=1e-2)


def test_an_interruption_without_new_weights_changes_nothing(clients: Clients) -> None:
    whole, parts, engine = OnlineScheduler(), OnlineScheduler(), tiny_engine()
    expected = clients.ask(whole, [3, 4, 5], 7)
    whole.serve(engine, all_done([expected]), nothing)
    found = clients.ask(parts, [3, 4, 5], 7)
    until_waiting(parts, 1)
    while not found.done():
        parts.serve(engine, questions(3), nothing)
        time.sleep(0.001)
    assert found.result().tokens == expected.result().tokens
    assert parts.num_leavings > 2


def test_nobody_is_served_whose_client_has_gone(clients: Clients) -> None:
    pump, engine = OnlineScheduler(), tiny_engine()
    gone, stays = clients.ask(pump, [3, 4], 0), clients.ask(pump, [5, 6], 1)
    until_waiting(pump, 2)
    pump.serve(engine, questions(3), nothing)
    gone.cancel()
    deadline = time.monotonic() + 10
    while not any(order.is_dropped for order in pump._waiting):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    asked: list[int] = []
    submit = engine.submit
    engine.submit = lambda request, params: (asked.append(request.sample_ids[0]), submit(request, params))[1]  # type: ignore[method-assign]
    pump.serve(engine, all_done([stays]), nothing)
    assert asked == [1]


def test_those_who_wait_and_those_who_come_later_learn_of_the_end(clients: Clients) -> None:
    pump = OnlineScheduler()
    waits = clients.ask(pump, [3, 4], 0)
    until_waiting(pump, 1)
    pump.close(ApiError(503, "it is over"))
    for answer in (waits, clients.ask(pump, [3, 4], 1)):
        with pytest.raises(ApiError, match="it is over"):
            answer.result(timeout=10)


def test_an_engine_that_takes_no_requests_leaves_nobody_waiting_forever(clients: Clients) -> None:
    class Full:
        def submit(self, *_: object) -> int:
            raise MemoryError("full")

    pump = OnlineScheduler()
    waits = [clients.ask(pump, [3, 4], number) for number in range(2)]
    until_waiting(pump, 2)
    with pytest.raises(MemoryError, match="full"):
        pump.serve(Full(), lambda: False, lambda: None)  # type: ignore[arg-type]
    pump.close(ApiError(503, "it is over"))
    for answer in waits:
        with pytest.raises(ApiError, match="it is over"):
            answer.result(timeout=10)


def test_a_wait_for_clients_gives_signs_of_life_and_ends_on_news(clients: Clients) -> None:
    pump, engine, beats = OnlineScheduler(), tiny_engine(), list[float]()
    begin = time.monotonic()
    threading.Timer(0.1, pump.wake).start()
    pump.serve(engine, lambda: len(beats) == 1, lambda: beats.append(time.monotonic() - begin))
    assert 0.05 < beats[0] < 0.9
    pump.serve(engine, lambda: len(beats) == 2, lambda: beats.append(time.monotonic() - begin))
    assert beats[1] - beats[0] > 0.5
    assert not pump.is_serving
