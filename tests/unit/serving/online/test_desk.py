"""Clients with OpenAI's package ask a policy that is trained, and say what its responses were worth."""

from __future__ import annotations

import copy
import io
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import openai
import pytest
from openai import OpenAI
from rich.console import Console
from tests.unit.environments.led import END, TOKENIZER, Speaker
from tests.unit.environments.test_programs import TOOL

from leaderless.config import Recipe, RecipeError
from leaderless.environments.chat_writer import ChatWriter
from leaderless.observability.console import Display
from leaderless.serving.listen import take_port
from leaderless.serving.online.server import OnlineService

QUESTION = [{"role": "user", "content": "one"}]


def recipe_of(**sections: object) -> Recipe:
    settings: dict[str, object] = {
        "name": "online",
        "workflow": "grpo",
        "models": {"policy": "/no/such/model"},
        "online": {"port": 0},
        "batch": {"responses_per_prompt": 4},
        "data": {"max_prompt_tokens": 300},
        "rollout": {"max_response_tokens": 200},
        "steps": 1,
    }
    return Recipe.model_validate(settings | sections)


def colors(context: str) -> str:
    """Call a tool where one is offered."""
    if "seventh" in context or "<|im_start|>tools" not in context:
        return f"blue{END}"
    return f"<tool_call>{json.dumps({'name': TOOL['function']['name'], 'arguments': {'word': 'ab'}})}</tool_call>{END}"  # type: ignore[index]


class Response(NamedTuple):
    """What a server has answered."""

    status_code: int
    body: Any


class Served:
    """A desk with an engine that works in a thread of its own while it is let."""

    def __init__(self, desk: OnlineService, engine: Speaker) -> None:
        self.desk, self.engine = desk, engine
        self.client = OpenAI(base_url=desk.address, api_key="none", max_retries=0)
        self.is_training = threading.Event()
        self.is_over = threading.Event()

    def work(self) -> None:
        while not self.is_over.is_set():
            if self.is_training.is_set():
                time.sleep(0.001)
                continue
            self.desk.pump.serve(self.engine, lambda: self.is_training.is_set() or self.is_over.is_set(), lambda: None)

    def post(self, **body: object) -> Response:
        return self.send(json.dumps(body).encode())

    def send(self, body: bytes | None, path: str = "/feedback") -> Response:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.desk.address}{path}", body, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                return Response(reply.status, json.loads(reply.read()))
        except urllib.error.HTTPError as error:
            return Response(error.code, json.loads(error.read()))


@contextmanager
def serving(
    say: Callable[[str], str] = colors, *, token: str | None = None, is_chat: bool = True, **sections: object
) -> Iterator[Served]:
    listener = take_port("127.0.0.1", 0, token, "online")
    writer = ChatWriter(copy.deepcopy(TOKENIZER), is_chat)
    desk = OnlineService(recipe_of(**sections), writer, listener, token)
    served = Served(desk, Speaker(say))
    thread = threading.Thread(target=served.work, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.is_over.set()
        desk.pump.wake()
        thread.join()
        desk.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def refusal(ask: Callable[[], object]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        ask()
    return caught.value


def test_each_choice_of_a_chat_with_tools_gets_feedback(served: Served) -> None:
    chats = served.client.chat.completions
    reply = chats.create(model="policy", messages=QUESTION, tools=[TOOL], n=2)  # type: ignore[call-overload]
    call = reply.choices[1].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"word": "ab"}
    told = [*QUESTION, reply.choices[1].message, {"role": "tool", "tool_call_id": call.id, "content": "seventh"}]
    second = chats.create(model="policy", messages=told, tools=[TOOL])  # type: ignore[call-overload]
    assert second.choices[0].message.content == "blue"
    for choice, word in enumerate(("rejected", "edited")):
        posted = served.post(id=reply.id, choice=choice, feedback=word)
        assert posted.body == {"id": reply.id, "choice": choice, "reward": 0.5 * choice}
    assert served.post(id=second.id, reward=0.75).status_code == 200
    assert served.post(id=second.id, feedback="accepted").status_code == 200
    (group,) = [served.desk.ledger._replies[identity] for identity in (reply.id,)]
    samples = [list(choice.trace.samples()) for choice in group.choices.values()]
    assert [len(one) for one in samples] == [1, 1]
    assert served.desk.ledger._replies[second.id].choices[0].reward == 1.0


def test_prompts_are_completed_and_streamed(served: Served) -> None:
    reply = served.client.completions.create(model="policy", prompt=["ab", "ba"], n=2, max_tokens=3)
    assert [choice.text for choice in reply.choices] == ["blu"] * 4
    assert {choice.finish_reason for choice in reply.choices} == {"length"}
    stream = served.client.chat.completions.create(model="policy", messages=QUESTION, stream=True)  # type: ignore[call-overload]
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "blue"
    assert served.post(id=chunks[0].id, feedback="accepted").status_code == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"n": 5}, "5 responses are more than the 4 of a group"),
        ({"temperature": 0.5}, "differs from the recipe's 1"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, "data.max_prompt_tokens + rollout.max_response"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "must end with a message of another role"),
    ],
)
def test_requests_that_cannot_be_trained_are_refused(served: Served, body: dict[str, object], text: str) -> None:
    asked = {"model": "policy", "messages": QUESTION} | body
    error = refusal(lambda: served.client.chat.completions.create(**asked))  # type: ignore[call-overload]
    assert error.status_code == 400
    assert text in error.message


@pytest.mark.parametrize(
    ("prompt", "text"),
    [([99_999_999], "prompt has token 99999999, but the model knows"), ([3, 10**6], "token 1000000")],
)
def test_token_ids_that_have_no_embedding_are_refused(served: Served, prompt: list[int], text: str) -> None:
    error = refusal(lambda: served.client.completions.create(model="policy", prompt=prompt))
    assert error.status_code == 400
    assert text in error.message


def test_an_error_that_nobody_expects_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        monkeypatch.setattr(served.desk, "_open", lambda _: {}["missing"])
        error = refusal(lambda: served.client.chat.completions.create(model="policy", messages=QUESTION))  # type: ignore[arg-type]
        assert error.status_code == 500
        counts = served.desk.ledger.counts.take()
        assert (counts.requests, counts.failed) == (1, 1)


def test_feedback_is_refused_with_its_reason(served: Served) -> None:
    assert served.post(id="chatcmpl-1", feedback="accepted").status_code == 404
    assert "must be an object" in served.send(b"[1]").body["error"]["message"]
    infinite = served.send(b'{"id": "a", "reward": Infinity}')
    assert infinite.status_code == 400
    assert "finite" in infinite.body["error"]["message"]


def test_requests_that_come_while_the_rank_trains_are_answered_afterwards() -> None:
    with ThreadPoolExecutor() as pool, serving() as served:
        ask = lambda: served.client.chat.completions.create(model="policy", messages=QUESTION)  # type: ignore[arg-type]  # noqa: E731
        ask()
        served.is_training.set()
        served.desk.pump.wake()
        while served.desk.pump.is_serving:
            time.sleep(0.001)
        waiting = [pool.submit(ask) for _ in range(3)]
        while len(served.desk.pump._waiting) < 3:
            time.sleep(0.001)
        assert served.send(None, "/models").body["data"][0]["id"] == "policy"
        assert not any(one.done() for one in waiting)
        served.is_training.clear()
        assert [one.result(timeout=10).choices[0].message.content for one in waiting] == ["blue"] * 3
        counts = served.desk.ledger.counts.take()
        assert (counts.requests, counts.failed) == (4, 0)
        assert (len(counts.latencies_s), len(counts.latencies_training_s)) == (1, 3)


def test_the_end_of_the_run_is_said_to_those_who_wait() -> None:
    with ThreadPoolExecutor() as pool, serving() as served:
        served.is_training.set()
        served.desk.pump.wake()
        waiting = pool.submit(served.client.completions.create, model="policy", prompt="ab")
        while not served.desk.pump._waiting:
            time.sleep(0.001)
        begin = time.monotonic()
        served.desk.close()
        error = refusal(lambda: waiting.result(timeout=10))
        assert (error.status_code, error.code) == (503, "run_ending")
        assert "the run is ending" in error.message
        assert time.monotonic() - begin < 5
        assert served.desk.ledger.counts.take().failed == 1


def test_other_machines_need_the_key_and_the_key_is_asked_for() -> None:
    with pytest.raises(RecipeError, match=r"online\.host: can be reached .* set LEADERLESS_TOKEN"):
        take_port("0.0.0.0", 0, None, "online")
    with take_port("127.0.0.1", 0, None, "online") as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(RecipeError, match=rf"online\.port: is {port}, which cannot be listened to"):
            take_port("127.0.0.1", port, None, "online")
    with serving(token="abc") as served:
        assert served.post(id="a", feedback="accepted").status_code == 401
        client = OpenAI(base_url=served.desk.address, api_key="abc", max_retries=0)
        assert client.models.list().data[0].id == "policy"


def test_a_client_that_goes_away_leaves_nothing_behind() -> None:
    with serving() as served:
        served.is_training.set()
        served.desk.pump.wake()
        impatient = OpenAI(base_url=served.desk.address, api_key="none", max_retries=0, timeout=0.2)
        with pytest.raises(openai.APITimeoutError):
            impatient.completions.create(model="policy", prompt="ab")
        deadline = time.monotonic() + 10
        while not all(order.is_dropped for order in served.desk.pump._waiting):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        served.is_training.clear()
        reply = served.client.completions.create(model="policy", prompt="ba")
        assert served.desk.ledger._replies.keys() == {reply.id}
        assert len(served.engine.requests) == 1


def test_the_progress_line_has_room_for_what_is_waited_for() -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=200, force_terminal=True, legacy_windows=False), is_shown=True)
    display.start(3, 0)
    display.status = lambda: "step 1,000: waiting for feedback 37/64"
    display.stop()
    assert "step 1,000: waiting for feedback 37/64" in text.getvalue()
