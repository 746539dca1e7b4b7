"""What clients of a served model may ask besides samples: echo, likely tokens, penalties, schemas, demanded calls."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import anthropic
import openai
import pytest
import torch
from openai import OpenAI
from pydantic import BaseModel
from tests.end_to_end.test_serve import DEADLINE_S, Site, Watched, running
from transformers import AutoModelForCausalLM

from leaderless.models.loading.tiny import write_tiny_model
from leaderless.planner.memory.limits import CachePool
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.make_engine import RolloutSetup
from leaderless.rollout.native.client_engine import ClientEngine
from leaderless.run import standalone_model
from leaderless.run.standalone_model import find_model, open_model

TEMPLATE = (
    "{% for t in tools or [] %}tool {{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}a: {{ 'think' if thinking else '' }}{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "size"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}}
    for name in ("look", "take")
]
ASKED: Any = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, string.printable, hidden_size=32, max_positions=2048, chat_template=TEMPLATE)
    with open_model(find_model(str(folder), "policy", print), "native", None, print) as served:
        served.serving.engine = watched = Watched(served.serving.engine)
        with running(served, None) as url:
            yield Site(url, folder, served, watched)


def log_probs_of(site: Site, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(site.folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=ASKED, **options)


def test_a_prompt_is_echoed_with_its_log_probabilities(site: Site) -> None:
    text = "12+34=ab"
    tokens = site.served.tokenizer.encode(text)
    expected = log_probs_of(site, tokens)
    asked: Any = {"model": "tiny", "prompt": text, "logprobs": 2, "temperature": 0}
    (choice,) = site.client.completions.create(max_tokens=0, echo=True, **asked).choices
    assert (choice.text, choice.finish_reason) == (text, "length")
    found: Any = choice.logprobs
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    own = [float(expected[place, token]) for place, token in enumerate(tokens[1:])]
    assert found.token_logprobs[1:] == pytest.approx(own, abs=1e-4)
    decode = site.served.tokenizer.decode
    for row, likely, token, log_prob in zip(expected, found.top_logprobs[1:], tokens[1:], own, strict=False):
        values, which = row.topk(2)
        pairs = zip(which.tolist(), values.tolist(), strict=True)
        wanted = {decode([one]): value for one, value in pairs} | {decode([token]): log_prob}
        assert likely == pytest.approx(wanted, abs=1e-4)
    assert [text[offset:][:1] for offset in found.text_offset] == list(text)

    extra = {"return_token_ids": True}
    plain: Any = site.client.completions.create(max_tokens=5, n=2, extra_body=extra, **asked)
    echoed: Any = site.client.completions.create(max_tokens=5, n=2, echo=True, extra_body=extra, **asked)
    for one, other in zip(echoed.choices, plain.choices, strict=True):
        assert one.text == text + other.text
        assert one.token_ids == other.token_ids
        assert one.logprobs.token_logprobs[len(tokens) :] == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
        assert one.logprobs.text_offset[len(tokens) :] == [len(text) + at for at in other.logprobs.text_offset]
    pieces = list(site.client.completions.create(max_tokens=5, n=2, echo=True, stream=True, **asked))
    for index, one in enumerate(echoed.choices):
        parts = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert "".join(part.text for part in parts) == one.text
        offsets = [at for part in parts for at in part.logprobs.text_offset]  # type: ignore[union-attr]
        assert offsets == one.logprobs.text_offset


def test_likely_tokens_are_returned_in_chats_and_responses(site: Site) -> None:
    options: Any = {"temperature": 0, "max_tokens": 4, "extra_body": {"return_token_ids": True}}
    reply = chat(site.client, logprobs=True, top_logprobs=3, **options)
    (choice,) = reply.choices
    expected = log_probs_of(site, reply.prompt_token_ids + choice.token_ids)[len(reply.prompt_token_ids) - 1 :]
    for row, one, token in zip(expected, choice.logprobs.content, choice.token_ids, strict=False):
        values, which = row.topk(3)
        assert [site.served.tokenizer.decode([other]) for other in which] == [some.token for some in one.top_logprobs]
        assert [some.logprob for some in one.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
        assert one.token == one.top_logprobs[0].token
        assert one.logprob == pytest.approx(one.top_logprobs[0].logprob, abs=1e-5)
        assert int(which[0]) == token
    said: Any = site.client.responses.create(
        model="tiny",
        input="1+1=",
        temperature=0,
        max_output_tokens=4,
        top_logprobs=3,
        include=["message.output_text.logprobs"],
    )
    (content,) = said.output[0].content
    assert [one.token for one in content.logprobs] == [one.token for one in choice.logprobs.content]
    assert [[some.token for some in one.top_logprobs] for one in content.logprobs] == [
        [some.token for some in one.top_logprobs] for one in choice.logprobs.content
    ]


def test_penalties_and_biases_reach_the_engine(site: Site) -> None:
    free = chat(site.client, temperature=0, max_tokens=30).choices[0].message.content
    varied = chat(site.client, temperature=0, max_tokens=30, frequency_penalty=2, presence_penalty=2)
    assert len(set(varied.choices[0].message.content)) > len(set(free))
    token = site.served.tokenizer.encode("7", add_special_tokens=False)[0]
    biased = chat(site.client, temperature=0, max_tokens=5, logit_bias={str(token): 100})
    assert biased.choices[0].message.content == "77777"
    for bias in ({"9999": 1.0}, {"x": 1.0}):
        with pytest.raises(openai.BadRequestError, match="logit_bias has") as caught:
            chat(site.client, logit_bias=bias)
        assert caught.value.param == "logit_bias"


def test_answers_follow_a_json_schema_in_all_apis(site: Site) -> None:
    class Found(BaseModel):
        place: str
        size: int

    form: Any = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
    texts = [one.message.content for one in chat(site.client, response_format=form, n=6, seed=3).choices]
    text: Any = {"format": {**form["json_schema"], "type": form["type"]}}
    seeded: Any = {"extra_body": {"seed": 4}}  # or a model that says anything might be cut off in white space
    texts.append(site.client.responses.create(model="tiny", input="1", text=text, **seeded).output_text)
    url = site.url.removesuffix("/v1")
    messages = anthropic.Anthropic(base_url=url, api_key="none").messages
    output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    asked: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 400}
    texts.append(messages.create(output_config=output, **asked, **seeded).content[0].text)
    pieces = chat(site.client, response_format=form, stream=True, seed=4)
    texts.append("".join(piece.choices[0].delta.content or "" for piece in pieces))
    for one in texts:
        found = json.loads(one)
        assert list(found) == ["place", "size"]
        assert found["place"] in {"here", "there"}
        assert 0 <= found["size"] <= 99
    parsed = site.client.chat.completions.parse(response_format=Found, seed=4, **asked)
    assert isinstance(parsed.choices[0].message.parsed, Found)
    anything = chat(site.client, response_format={"type": "json_object"}, max_tokens=300, seed=1).choices[0]
    assert anything.finish_reason == "length" or isinstance(json.loads(anything.message.content), dict)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nonsense"}, "cannot be compiled: Invalid type: nonsense"),
        ({"$ref": "http://example.org/x"}, "cannot be compiled"),
        ({"type": "string", "pattern": "(?=a)b"}, "cannot be compiled: regex parse error"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
    ],
)
def test_a_schema_that_cannot_be_compiled_hurts_nobody_else(site: Site, schema: dict[str, Any], words: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(chat, site.client, max_tokens=60, seed=5)
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            chat(site.client, response_format=form)
        assert caught.value.param == "response_format"
        again = chat(site.client, max_tokens=60, seed=5)
        assert other.result(DEADLINE_S).choices[0].message == again.choices[0].message
    client = anthropic.Anthropic(base_url=site.url.removesuffix("/v1"), api_key="none")
    asked: Any = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(model="tiny", max_tokens=9, messages=ASKED, **asked)


def test_calls_that_are_demanded_are_made_in_all_apis(site: Site) -> None:
    named: Any = {"type": "function", "function": {"name": "take"}}
    calls: list[tuple[str, str]] = []
    for choice in ("required", named):
        options: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
        reply = chat(site.client, parallel_tool_calls=False, n=4, seed=2, **options)
        assert {one.finish_reason for one in reply.choices} == {"tool_calls"}
        made = [call.function for one in reply.choices for call in one.message.tool_calls]
        assert len(made) == 4
        assert choice == "required" or {one.name for one in made} == {"take"}
        calls += [(one.name, one.arguments) for one in made]
    offered: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    seeded: Any = {"extra_body": {"seed": 2}}
    said: Any = site.client.responses.create(
        model="tiny", input="1", tools=offered, tool_choice={"type": "function", "name": "look"}, **seeded
    )
    calls += [(item.name, item.arguments) for item in said.output]
    tools: Any = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS]
    client = anthropic.Anthropic(base_url=site.url.removesuffix("/v1"), api_key="none")
    for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
        asked: Any = {"tools": tools, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
        for seed in range(4):
            more: Any = {"extra_body": {"seed": seed}}
            turn = client.messages.create(model="tiny", max_tokens=400, messages=ASKED, **asked, **more)
            assert turn.stop_reason == "tool_use"
            (block,) = turn.content
            assert block.type == "tool_use"
            calls.append((block.name, json.dumps(block.input)))
    assert len(calls) == 8 + len(said.output) + 8
    for name, text in calls:
        assert name in {"look", "take"}
        assert json.loads(text)["place"] in {"here", "there"}
    with pytest.raises(openai.BadRequestError, match="no such tool is offered"):
        chat(site.client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "drop"}})


def test_arguments_of_the_template_are_passed_on(site: Site) -> None:
    options: Any = {"max_tokens": 1}
    prompts = []
    for thinking in (True, False, None):
        given = {} if thinking is None else {"chat_template_kwargs": {"thinking": thinking}}
        reply = chat(site.client, extra_body={"return_token_ids": True, **given}, **options)
        prompts.append(site.served.tokenizer.decode(reply.prompt_token_ids, skip_special_tokens=True))
    assert prompts[0] == f"{prompts[1]}think"
    assert prompts[1] == prompts[2]
    with pytest.raises(openai.BadRequestError, match="must not have 'chat_template'"):
        chat(site.client, extra_body={"chat_template_kwargs": {"chat_template": "x"}})


def test_a_schema_without_its_package_is_refused_with_the_remedy(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderless.serving.api.grammars.find_spec", {}.get)
    with pytest.raises(openai.InternalServerError, match=r"needs the package llguidance: .*\[serve\]") as caught:
        chat(site.client, response_format={"type": "json_object"})
    assert caught.value.status_code == 501


def test_a_full_engine_has_no_pool_of_pages(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator, a pool makes the native engine one that cannot do all."""
    made: list[RolloutSetup] = []

    def note(name: str, setup: RolloutSetup) -> RolloutEngine:
        made.append(setup)
        raise LookupError(name)

    source, pool = find_model(str(site.folder), "policy", print), CachePool(64, stays=True)
    monkeypatch.setattr(standalone_model, "alone_here", lambda: nullcontext(torch.device("cpu")))
    monkeypatch.setattr(standalone_model, "cache_pool", lambda *_: pool)
    monkeypatch.setattr(standalone_model, "make_engine", note)
    for is_full in (False, True):
        with pytest.raises(LookupError), open_model(source, "native", None, print, is_full=is_full):
            pass
    assert [setup.pool for setup in made] == [pool, None]
    assert all(setup.has_clients for setup in made)
    assert isinstance(site.engine.engine, ClientEngine)
