"""A server in the format of vLLM teaches as a model on the ranks does; what goes wrong with it is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from tests.engines import make_trainer
from tests.tiny import random_samples, tiny_model
from transformers import AutoModelForCausalLM

from leaderless.algorithms.settings import DistillationConfig, TeacherServerConfig
from leaderless.data.batch import Batch
from leaderless.stages import teacher_server
from leaderless.stages.teacher_server import TeacherServer

LENGTHS = [(3, 4), (1, 2), (5, 1)]
Answer = Callable[[dict[str, Any]], tuple[int, str]]


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's function says, and remembers what was asked."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server: Any = self.server
        server.asked.append((self.path, self.headers.get("authorization"), asked))
        status, text = server.answer(asked)
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked = []
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_server.time, "sleep", lambda _: None)


def as_vllm(path: str) -> Answer:
    """The answers of vLLM 0.32 for a model: no entry for the first token, then words by id with their ranks."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()

    @torch.no_grad()
    def answer(asked: dict[str, Any]) -> tuple[int, str]:
        tokens, how_many = asked["prompt"], asked["prompt_logprobs"]
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        entries: list[object] = [None]
        for place, token in enumerate(tokens[1:]):
            best = scores[place].topk(how_many).indices.tolist()
            words = dict.fromkeys([token, *best])  # the token itself comes first
            ranks = scores[place].argsort(descending=True).tolist()
            entries.append(
                {
                    str(word): {
                        "logprob": float(scores[place, word]),
                        "rank": ranks.index(word) + 1,
                        "decoded_token": "?",
                    }
                    for word in words
                }
            )
        choice = {"index": 0, "text": "?", "logprobs": None, "finish_reason": "length", "prompt_logprobs": entries}
        return 200, json.dumps({"object": "text_completion", "choices": [choice]})

    return answer


def config_of(server: Any, **changes: object) -> TeacherServerConfig:
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    return TeacherServerConfig.model_validate({"url": url, "model": "large", "timeout_s": 20.0, **changes})


def samples() -> Batch:
    return random_samples(LENGTHS)


@pytest.mark.parametrize("how_many", [1, 4])
def test_a_server_finds_the_words_that_a_model_on_the_ranks_finds(
    server: Any, how_many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = as_vllm(tiny_model())
    monkeypatch.setenv("TEACHER_KEY", "secret")
    found = TeacherServer(config_of(server, api_key_env="TEACHER_KEY")).likeliest_words(samples(), how_many, 1.0)
    expected = make_trainer(tiny_model()).likeliest_words(samples(), how_many, 1.0)
    assert torch.equal(found.lengths, expected.lengths)
    assert torch.equal(found.values[:, 0], expected.values[:, 0])
    is_word = expected.values[:, 0] >= 0
    torch.testing.assert_close(found.values[:, 1][is_word], expected.values[:, 1][is_word], rtol=1e-4, atol=1e-5)
    path, key, asked = server.asked[0]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert {**asked, "prompt": 0} == {
        "model": "large",
        "prompt": 0,
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": how_many,
    }


def test_a_temperature_changes_what_renormalizing_makes_of_the_words(server: Any) -> None:
    server.answer = as_vllm(tiny_model())
    warm, plain = (TeacherServer(config_of(server)).likeliest_words(samples(), 4, one).values for one in (2.0, 1.0))
    expected = make_trainer(tiny_model()).likeliest_words(samples(), 4, 2.0).values
    assert torch.equal(warm[:, 0], plain[:, 0])
    both = (one[:, 1, :4].log_softmax(1) for one in (warm, expected))
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)


def test_a_server_in_trouble_is_asked_again(server: Any) -> None:
    right, failures = as_vllm(tiny_model()), iter([503, 429])

    def answer(asked: dict[str, Any]) -> tuple[int, str]:
        status = next(failures, 200)
        return right(asked) if status == 200 else (status, "busy")

    server.answer = answer
    teacher = TeacherServer(config_of(server, max_requests=1, retries=2))
    assert int(teacher.likeliest_words(samples(), 2, 1.0).lengths.sum()) == len(expected_tokens())
    assert len(server.asked) == len(LENGTHS) + 2


def expected_tokens() -> list[bool]:
    return [one for row in samples().jagged("response_mask").to_lists() for one in row if one]


WRONG: dict[str, tuple[int, str, int, str]] = {
    "refused": (400, "max_logprobs is 20", 1, "answered with status 400: max_logprobs is 20"),
    "down": (500, "oh", 3, "answered with status 500: oh"),
    "another format": (200, '{"choices": [{"text": "x"}]}', 1, "no prompt_logprobs, which vLLM's server gives"),
    "too short": (200, '{"choices": [{"prompt_logprobs": [null]}]}', 1, "are of 1 tokens, and"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_goes_wrong_is_named_with_the_address(server: Any, case: str) -> None:
    status, text, times, words = WRONG[case]
    server.answer = lambda _: (status, text)
    teacher = TeacherServer(config_of(server, retries=2, max_requests=1))
    with pytest.raises(RuntimeError, match=words) as caught:
        teacher.likeliest_words(samples().select(torch.tensor([0])), 2, 1.0)
    assert f"the teacher at http://127.0.0.1:{server.server_address[1]}/v1" in str(caught.value)
    assert len(server.asked) == times


def test_a_server_with_another_tokenizer_is_found_out(server: Any) -> None:
    def answer(asked: dict[str, Any]) -> tuple[int, str]:
        entries = [{"7": {"logprob": -0.1}, "8": {"logprob": -3.0}}] * len(asked["prompt"])
        return 200, json.dumps({"choices": [{"prompt_logprobs": entries}]})

    server.answer = answer
    with pytest.raises(RuntimeError, match=r"lack the token \d+ itself: does it have the student's tokenizer"):
        TeacherServer(config_of(server)).likeliest_words(samples(), 2, 1.0)


def test_a_key_that_is_not_there_and_a_server_that_is_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    given = {"url": "http://127.0.0.1:9/v1", "model": "large", "retries": 0, "timeout_s": 5.0}
    with pytest.raises(RuntimeError, match="TEACHER_KEY: the environment has no such"):
        TeacherServer(TeacherServerConfig.model_validate(given | {"api_key_env": "TEACHER_KEY"}))
    with pytest.raises(RuntimeError, match="no answer within 5 s, or none at all"):
        TeacherServer(TeacherServerConfig.model_validate(given)).likeliest_words(samples(), 2, 1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"server": {"url": "127.0.0.1:8000", "model": "x"}, "top_k": 2}, "url"),
        ({"server": {"url": "http://h/v1", "model": "x"}}, "server needs words that teachers give"),
        (
            {"server": {"url": "http://h/v1", "model": "x"}, "top_k": 2, "temperature": 2.0},
            "a server gives probabilities at 1: set tail=renormalize",
        ),
        ({"server": {"url": "http://h/v1", "model": "x"}, "top_k": 2, "teacher": "other"}, "leave out teacher"),
    ],
)
def test_settings_that_a_server_cannot_follow_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistillationConfig.model_validate(settings)


def test_as_many_requests_are_made_at_a_time_as_set_and_none_lasts_longer_than_set(server: Any) -> None:
    right, meeting = as_vllm(tiny_model()), threading.Barrier(2)
    meet = threading.Event()

    def answer(asked: dict[str, Any]) -> tuple[int, str]:
        if not meet.is_set():  # the first two meet, if they come at the same time
            meeting.wait(20)
            meet.set()
        return right(asked)

    server.answer = answer
    with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
        TeacherServer(config_of(server, max_requests=1, retries=0, timeout_s=0.2)).likeliest_words(samples(), 2, 1.0)
    meeting.reset()
    found = TeacherServer(config_of(server, max_requests=2, retries=0)).likeliest_words(samples(), 2, 1.0)
    assert len(found) == len(LENGTHS)
