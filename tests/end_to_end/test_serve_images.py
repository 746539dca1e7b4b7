"""`leaderless serve` with a model that sees images, asked by OpenAI's own client."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch
from openai import OpenAI
from PIL import Image
from tests.end_to_end.test_serve import DEADLINE_S, running
from tests.pictures import picture, reader_of, vision_model
from tests.unit.environments.test_pictures import TEMPLATE

from leaderless.base.image_files import image_size
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.prompts.images import placed
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.run.standalone_model import find_model, open_model
from leaderless.serving.api.app import sample_ids

FILES = [picture(32, 32, 1), picture(16, 24, 2), picture(40, 16, 3)]
MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def with_template(source: str, folder: Path) -> str:
    """A copy of a model whose tokenizer has a chat template."""
    shutil.copytree(source, folder)
    tokenizer: Any = load_tokenizer(ModelConfig(path=source), "policy")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = with_template(vision_model(), tmp_path_factory.mktemp("model") / "seeing")
    with open_model(find_model(folder, "policy", print), "native", None, print) as served, running(served, None) as url:
        yield OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S)


def shown(data: bytes | str) -> dict[str, object]:
    url = data if isinstance(data, str) else f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


def asked(*parts: dict[str, object]) -> Any:
    return [{"role": "user", "content": list(parts)}]


def test_a_chat_with_images_is_what_the_engine_samples(seeing: OpenAI) -> None:
    messages = asked(shown(FILES[0]), text("how many "), shown(FILES[1]), text("red"))
    messages += [{"role": "assistant", "content": "3"}, *asked(shown(FILES[2]), text(" squares? "))]
    config, reader = ModelConfig(path=vision_model()), reader_of()
    model, tokenizer = load_causal_lm(config, "policy"), load_tokenizer(config, "policy")
    pictures = [(*reader.grid(*image_size(data)), data) for data in FILES]
    marked = ["".join([MARKS[0], MARKS[1] * rows * columns, MARKS[2]]) for rows, columns, _ in pictures]
    end = "<|im_end|>"
    tokens = tokenizer.encode(f"{marked[0]}how many {marked[1]}red{end}3{end}{marked[2]} squares? {end}")
    engine = NativeEngine(model, tokenizer, end_tokens(config, tokenizer), 8, torch.device("cpu"))
    request = Request(tokens, sample_ids(5, 2), images=placed(tokens, reader, pictures))
    (expected,) = generate(engine, [request], SamplingParams(SamplingConfig(temperature=0.8), 12))
    options: Any = {"model": "seeing", "n": 2, "seed": 5, "max_tokens": 12, "temperature": 0.8, "logprobs": True}
    extra = {"return_token_ids": True}
    reply: Any = seeing.chat.completions.create(messages=messages, extra_body=extra, **options)
    assert reply.prompt_token_ids == tokens
    assert reply.usage.prompt_tokens == len(tokens)
    for choice, completion in zip(reply.choices, expected, strict=True):
        assert choice.token_ids == completion.tokens
        assert [one.logprob for one in choice.logprobs.content] == pytest.approx(completion.log_probs, abs=1e-4)
    pieces: Any = seeing.chat.completions.create(messages=messages, extra_body=extra, stream=True, **options)
    streamed: list[list[int]] = [[], []]
    for piece in pieces:
        for choice in piece.choices:
            streamed[choice.index] += getattr(choice, "token_ids", None) or []
    assert streamed == [completion.tokens for completion in expected]
    messages[0]["content"][0] = shown(picture(32, 32, 9))
    other: Any = seeing.chat.completions.create(messages=messages, extra_body=extra, **options)
    assert other.prompt_token_ids == tokens
    assert [one.logprob for one in other.choices[0].logprobs.content] != [
        one.logprob for one in reply.choices[0].logprobs.content
    ], "another image of the same size"


def huge() -> bytes:
    file = io.BytesIO()
    Image.new("1", (10_001, 2)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        ("https://example.org/a.png", "is no data URL: addresses and paths are not read; send the image itself"),
        ("/etc/hostname", "is no data URL: addresses and paths are not read"),
        ("data:image/png;base64,@@@", "an image is no base64"),
        ("data:image/png;base64,AAAA", "are no image"),
        (FILES[0][:-40], "is damaged"),
        (huge(), "10,001 x 2 pixels; at most 10,000 a side"),
    ],
    ids=["address", "path", "base64", "no image", "damaged", "huge"],
)
def test_images_that_cannot_be_used_are_refused(seeing: OpenAI, image: bytes | str, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match="an image cannot be used: ") as caught:
        seeing.chat.completions.create(model="seeing", messages=asked(shown(image), text("red")), max_tokens=2)
    assert problem in caught.value.message
    assert caught.value.param == "messages"


def test_prompts_have_no_tokens_of_images_that_are_not_there(seeing: OpenAI) -> None:
    for prompt in (MARKS[1], [3, reader_of().token]):
        with pytest.raises(openai.BadRequestError, match="tokens that stand for images: send images to /v1/chat"):
            seeing.completions.create(model="seeing", prompt=prompt, max_tokens=2)
    reply: Any = seeing.chat.completions.create(
        model="seeing", messages=asked(text(MARKS[1])), max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert reader_of().token not in reply.prompt_token_ids, "the text of a message is text"
    many = asked(*[shown(picture(32, 32, seed)) for seed in range(70)])
    with pytest.raises(openai.BadRequestError, match=r"messages has .* tokens, but prompt and response may have 1024"):
        seeing.chat.completions.create(model="seeing", messages=many)
    assert seeing.completions.create(model="seeing", prompt="red", max_tokens=2).choices, "the server continues"


def test_other_parts_are_refused_and_details_have_no_effect(seeing: OpenAI) -> None:
    part = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="parts of type text or image_url"):
        seeing.chat.completions.create(model="seeing", messages=asked(part), max_tokens=2)
    closer = shown(FILES[0])
    closer["image_url"] = {**closer["image_url"], "detail": "high"}  # type: ignore[dict-item]
    tokens = []
    for one in (closer, shown(FILES[0])):
        extra = {"return_token_ids": True}
        reply: Any = seeing.chat.completions.create(model="seeing", messages=asked(one), max_tokens=2, extra_body=extra)
        tokens.append(reply.prompt_token_ids)
    assert tokens[0] == tokens[1]


def test_images_in_results_of_tools_are_seen_in_all_apis(seeing: OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*asked(text("look")), {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "c", "content": [text("this: "), shown(FILES[0])]})
    options: Any = {"model": "seeing", "max_tokens": 3, "extra_body": {"return_token_ids": True, "seed": 4}}
    chat: Any = seeing.chat.completions.create(messages=messages, **options)
    assert chat.prompt_token_ids.count(reader_of().token) > 1

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILES[0]).decode()}
    result = {"type": "tool_result", "tool_use_id": "c"}
    blocks: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [result | {"content": [text("this: "), {"type": "image", "source": source}]}]},
    ]
    url = str(seeing.base_url).removesuffix("/v1/")
    said: Any = anthropic.Anthropic(base_url=url, api_key="none").messages.create(messages=blocks, **options)
    assert said.prompt_token_ids == chat.prompt_token_ids
    assert said.token_ids == chat.choices[0].token_ids
