"""`leaderless serve`, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import http.client
import json
import shlex
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import openai
import pytest
import torch
from examples.serve.ask import ask, ask_streaming
from openai import AsyncOpenAI, OpenAI

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.models.loading.tokenizer import end_tokens
from leaderless.rollout.engine import Completion, Delta, Request, RolloutEngine, SamplingParams, generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.run.standalone_model import Served, find_model, open_model
from leaderless.serving.api.app import ModelServer, sample_ids
from leaderless.serving.listen import take_port

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: "
PROMPT = "12+é34="
ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0


class Watched:
    """The native engine, with a record of what it does."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.num_steps = self.num_submitted = 0
        self.aborted: list[int] = []
        self.num_awaited = 0
        """Nothing is sampled until this number of requests has arrived."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def submit(self, request: Request, params: SamplingParams) -> int:
        self.num_submitted += 1
        return self.engine.submit(request, params)

    def step(self) -> list[Delta]:
        if self.num_submitted < self.num_awaited:
            time.sleep(0.002)
            return []
        self.num_steps += 1
        return self.engine.step()

    def forget(self, conversation: int) -> None:
        pass

    def abort(self, request: int) -> None:
        self.aborted.append(request)
        self.engine.abort(request)


@dataclass(frozen=True)
class Site:
    """A server that runs in a thread.

    Attributes:
        url: URL of its API.
        folder: Folder of its model.
        served: Model that it serves.
        engine: Engine that samples.
    """

    url: str
    folder: Path
    served: Served
    engine: Watched

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=DEADLINE_S)

    def expected(self, prompt: list[int], n: int, seed: int, max_tokens: int, **sampling: float) -> list[Completion]:
        """The samples of the engine without a server."""
        config = ModelConfig(path=str(self.folder))
        model, tokenizer = load_causal_lm(config, "policy"), self.served.tokenizer
        engine = NativeEngine(model, tokenizer, end_tokens(config, tokenizer), 8, torch.device("cpu"))
        params = SamplingParams(SamplingConfig(**sampling), max_tokens)  # type: ignore[arg-type]
        return generate(engine, [Request(prompt, sample_ids(seed, n))], params)[0]

    def text(self, completion: Completion) -> str:
        return self.served.tokenizer.decode(completion.tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A model whose tokens are parts of characters, which it combines at random."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, "0123456789+=abé你😀 :\nu", hidden_size=32, chat_template=TEMPLATE)
    with open_model(find_model(str(folder), "policy", print), "native", None, print) as served:
        served.serving.engine = watched = Watched(served.serving.engine)
        with running(served, None) as url:
            yield Site(url, folder, served, watched)


@contextmanager
def running(served: Served, token: str | None) -> Iterator[str]:
    """The address of a server in a thread."""
    started: Queue[None] = Queue()
    server, listener = ModelServer(served, token), take_port("127.0.0.1", 0, token)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(lambda: asyncio.run(server.answer(listener, lambda: started.put(None))))
        started.get(timeout=DEADLINE_S)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            ended.result(DEADLINE_S)


def test_a_completion_is_what_the_engine_samples_with_tokens_and_log_probs(site: Site) -> None:
    tokens = site.served.tokenizer.encode(PROMPT)
    expected = site.expected(tokens, 3, 5, 20, temperature=0.8, min_p=0.02, top_k=30)
    extra = {"return_token_ids": True, "min_p": 0.02, "top_k": 30}
    for prompt in (PROMPT, tokens):
        reply: Any = site.client.completions.create(
            model="tiny", prompt=prompt, n=3, seed=5, max_tokens=20, temperature=0.8, logprobs=0, extra_body=extra
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        for choice, completion in zip(reply.choices, expected, strict=True):
            assert (choice.token_ids, choice.prompt_token_ids) == (completion.tokens, tokens)
            assert choice.logprobs.token_logprobs == pytest.approx(completion.log_probs, abs=1e-4)
            assert choice.logprobs.tokens == [site.served.tokenizer.decode([token]) for token in completion.tokens]
            assert choice.text == site.text(completion)
            assert choice.finish_reason == completion.finish_reason
        num_sampled = sum(len(completion.tokens) for completion in expected)
        assert reply.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": len(tokens),
            "completion_tokens": num_sampled,
            "total_tokens": len(tokens) + num_sampled,
        }
        assert (reply.object, reply.model) == ("text_completion", "tiny")


def test_a_chat_goes_through_the_template_of_the_model(site: Site) -> None:
    tokens = site.served.tokenizer.encode("u: 1+1=\na: 2\nu: 2+2=\na: ", add_special_tokens=False)
    (expected,) = site.expected(tokens, 1, 3, 9)
    said = [("user", "1+1="), ("assistant", "2"), ("user", "2+2=")]
    messages: Any = [{"role": role, "content": content} for role, content in said]
    reply: Any = site.client.chat.completions.create(
        model="tiny",
        messages=messages,
        seed=3,
        max_completion_tokens=9,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    (choice,) = reply.choices
    assert reply.prompt_token_ids == choice.prompt_token_ids == tokens
    assert choice.token_ids == expected.tokens
    assert (choice.message.role, choice.message.content) == ("assistant", site.text(expected))
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(expected.log_probs, abs=1e-4)
    for one, token in zip(choice.logprobs.content, expected.tokens, strict=True):
        assert one.token == site.served.tokenizer.decode([token])
        assert one.bytes == (None if "\N{REPLACEMENT CHARACTER}" in one.token else list(one.token.encode()))
    messages.append(choice.message)
    assert site.client.chat.completions.create(model="tiny", messages=messages, max_tokens=2).choices, "it can go on"


def test_a_model_of_text_is_shown_no_images(site: Site) -> None:
    parts: Any = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    chat: Any = [{"role": "user", "content": [*parts, image]}]
    with pytest.raises(openai.BadRequestError, match="'tiny' reads text alone: leave images out") as caught:
        site.client.chat.completions.create(model="tiny", messages=chat, max_tokens=2)
    assert caught.value.param == "messages"
    chat[0]["content"] = parts
    assert site.client.chat.completions.create(model="tiny", messages=chat, max_tokens=2).choices


def test_a_chat_is_as_long_as_the_model_can_take_if_nothing_is_said(site: Site) -> None:
    chat: Any = [{"role": "user", "content": "1" * 480}]
    extra = {"return_token_ids": True}
    reply: Any = site.client.chat.completions.create(model="tiny", messages=chat, n=8, seed=0, extra_body=extra)
    cut = [choice.token_ids for choice in reply.choices if choice.finish_reason == "length"]
    assert {len(tokens) for tokens in cut} == {512 - reply.usage.prompt_tokens}


def test_what_is_streamed_adds_up_to_the_whole(site: Site) -> None:
    asked: Any = {"model": "tiny", "n": 3, "seed": 11, "max_tokens": 40, "stop": "1"}
    extra = {"return_token_ids": True}
    whole: Any = site.client.completions.create(prompt=PROMPT, logprobs=0, extra_body=extra, **asked)
    texts, tokens, log_probs, ends = [""] * 3, [[], [], []], [[], [], []], [""] * 3  # type: ignore[var-annotated]
    pieces: Any = site.client.completions.create(prompt=PROMPT, logprobs=0, extra_body=extra, stream=True, **asked)
    for piece in pieces:
        (choice,) = piece.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.token_ids
        log_probs[choice.index] += choice.logprobs.token_logprobs
        ends[choice.index] = choice.finish_reason
        assert piece.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    for mine, choice in zip(log_probs, whole.choices, strict=True):
        assert mine == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)


def test_a_streamed_chat_says_who_speaks_then_what_then_counts(site: Site) -> None:
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "é+😀"}], "seed": 2, "max_tokens": 30}
    whole = site.client.chat.completions.create(n=2, **chat)
    options: Any = {"include_usage": True}
    pieces = list(site.client.chat.completions.create(n=2, stream=True, stream_options=options, **chat))
    assert [piece.choices[0].delta.role for piece in pieces[:2]] == ["assistant", "assistant"]
    said = [""] * 2
    for piece in pieces[:-1]:
        assert piece.usage is None
        said[piece.choices[0].index] += piece.choices[0].delta.content or ""
    assert said == [choice.message.content for choice in whole.choices]
    assert pieces[-1].choices == []
    assert pieces[-1].usage == whole.usage


def test_nothing_of_a_stop_text_is_sent(site: Site) -> None:
    asked: Any = {"model": "tiny", "prompt": PROMPT, "seed": 4, "max_tokens": 40}
    free = site.client.completions.create(**asked).choices[0].text
    stop = next(free[i : i + 2] for i in range(3, len(free)) if "\N{REPLACEMENT CHARACTER}" not in free[i : i + 2])
    stopped = site.client.completions.create(**asked, stop=["nowhere", stop]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[: free.index(stop)], "stop")


def test_a_seed_gives_the_same_answer_and_none_another(site: Site) -> None:
    def answer(seed: int | None) -> list[str]:
        reply = site.client.completions.create(model="tiny", prompt=PROMPT, n=2, seed=seed, max_tokens=20)
        return [choice.text for choice in reply.choices]

    assert answer(-1) == answer(-1)
    assert len({tuple(answer(seed)) for seed in (-1, 0, None, None)}) == 4
    assert len(set(answer(0))) == 2, "the choices differ"


def test_several_prompts_are_answered_in_their_order(site: Site) -> None:
    prompts = ["1+1=", "2+2=", "3+3="]
    together = site.client.completions.create(model="tiny", prompt=prompts, n=2, temperature=0, max_tokens=6)
    single = [site.client.completions.create(model="tiny", prompt=p, temperature=0, max_tokens=6) for p in prompts]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [one.choices[0].text for one in single for _ in range(2)]


def test_requests_of_many_clients_are_sampled_together(site: Site) -> None:
    engine, before = site.engine, site.engine.num_steps
    alone = [site.client.completions.create(model="tiny", prompt=f"{i}+", seed=i, max_tokens=30) for i in range(6)]
    num_alone, before = engine.num_steps - before, engine.num_steps
    engine.num_awaited = engine.num_submitted + 6

    async def ask_all() -> list[openai.types.Completion]:
        async with AsyncOpenAI(base_url=site.url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
            asked = [client.completions.create(model="tiny", prompt=f"{i}+", seed=i, max_tokens=30) for i in range(6)]
            return await asyncio.gather(*asked)

    together = asyncio.run(ask_all())
    assert [one.choices[0].text for one in together] == [one.choices[0].text for one in alone]
    assert engine.num_steps - before <= 31 < num_alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_not_sampled_for(site: Site, stream: bool) -> None:
    engine, before = site.engine, site.engine.num_submitted
    num_aborted, engine.num_awaited = len(engine.aborted), before + 2
    connection = http.client.HTTPConnection(site.url.split("/")[2], timeout=DEADLINE_S)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "1"}], "n": 2, "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse() if stream else None
    assert response is None or response.read(5) == b"data:"
    await_true(lambda: engine.num_submitted == before + 1)
    if response is not None:
        response.close()
    connection.close()
    await_true(lambda: len(engine.aborted) == num_aborted + 1)
    num_steps = engine.num_steps
    assert site.client.completions.create(model="tiny", prompt="1", max_tokens=1).choices, "others are answered"
    assert engine.num_steps - num_steps <= 2, "and the engine has nothing else to do"


def await_true(condition: Any) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_bad_input_is_an_error_that_the_client_understands(site: Site) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown field beams") as caught:
        site.client.completions.create(model="tiny", prompt="1", extra_body={"beams": 3})
    assert (caught.value.param, caught.value.type) == ("beams", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="ask for at most 511") as caught:
        site.client.completions.create(model="tiny", prompt=[1], max_tokens=512)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="only 'tiny'"):
        site.client.completions.create(model="gpt", prompt="1")
    chat: Any = [{"role": 3, "content": "1"}]
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.role=3"):
        site.client.chat.completions.create(model="tiny", messages=chat)


def test_the_model_is_listed(site: Site) -> None:
    (model,) = site.client.models.list().data
    assert model == site.client.models.retrieve("tiny")
    assert (model.id, model.owned_by) == ("tiny", "leaderless")
    assert model.model_extra["max_model_len"] == 512


def test_the_command_of_the_guide_is_answered(site: Site) -> None:
    page = (ROOT / "docs/guides/serve.md").read_text(encoding="utf-8")
    words = shlex.split(page[page.index("curl ") :].partition("\n```")[0].replace("\\\n", " "))
    url, header, body = words[1], words[words.index("-H") + 1], words[words.index("-d") + 1]
    name, _, value = header.partition(": ")
    url = url.replace("http://127.0.0.1:8000/v1", site.url)
    body = body.replace('"quickstart"', '"tiny"')
    request = urllib.request.Request(url, body.encode(), {name: value})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        assert json.load(response)["choices"][0]["text"]


def test_the_example_asks_as_the_guide_says(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ask(site.url, "tiny", PROMPT)
    assert len(set(texts)) == 2
    assert ask_streaming(site.url, "tiny", PROMPT)
    assert "stop" in capsys.readouterr().out.replace("length", "stop")
