"""A request that cannot be answered as asked is refused, with the name of the field."""

from __future__ import annotations

import json

import pytest

from leaderless.environments.programs.conversations import checked
from leaderless.serving.api.chat_requests import ChatQuestion
from leaderless.serving.api.requests import ApiRequest, CompletionQuestion, read_question
from leaderless.serving.http_server import ApiError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}


def refused(kind: type[ApiRequest], body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_question(body if isinstance(body, bytes) else json.dumps(body).encode(), kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'?"),
        ({"zzz": 1}, "zzz", "unknown field zzz"),
        ({"temperature": -1}, "temperature", "temperature=-1: must be greater than or equal to 0"),
        ({"temperature": "1"}, "temperature", "must be a valid number"),
        ({"top_p": 0}, "top_p", "must be greater than 0"),
        ({"n": 0}, "n", "n=0: must be greater than or equal to 1"),
        ({"n": 1.5}, "n", "must be a valid integer"),
        ({"n": True}, "n", "must be a number"),
        ({"seed": 1 << 63}, "seed", "must be less than"),
        ({"stop": ["a", ""]}, "stop", "a text or a list of texts, none of them empty"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        (
            {"stream": True, "stream_options": {"usage": 1}},
            "stream_options.usage",
            "unknown field stream_options.usage",
        ),
        ({"echo": 1}, "echo", "must be a valid boolean"),
        ({"best_of": 2}, "best_of", "ask for n responses"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"logit_bias": {"1": 500}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"a": 5}}, "logit_bias", "'a', which is no token id"),
        ({"suffix": "end"}, "suffix", "at the end only"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "must be"),
        ({"max_tokens": 0}, "max_tokens", "gives nothing without echo=true"),
        ({"prompt": []}, "prompt", "give at least one prompt"),
        ({"prompt": [1, "a"]}, "prompt", "a text, a list of texts, token ids, or a list of lists"),
        ({"prompt": [-1]}, "prompt", "a text, a list of texts, token ids, or a list of lists"),
        ({"prompt": [True]}, "prompt", "a text, a list of texts, token ids, or a list of lists"),
        ({"prompt": None}, "prompt", "prompt must be given"),
        ({"messages": []}, "messages", "unknown field messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, object], param: str, words: str) -> None:
    error = refused(CompletionQuestion, COMPLETION | fields)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "must be given"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role", "must be given"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "of type text or image_url",
        ),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages.0.tool_calls.0", "must be"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them, or the same number"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"logprobs": 0}, "logprobs", "must be a valid boolean"),
        ({"tools": [{"type": "function"}]}, "tools.0", 'must be {"type": "function", "function": {"name"'),
        ({"tool_choice": "required"}, "tool_choice", "no such tool is offered"),
        ({"tool_choice": "always"}, "tool_choice", "must be auto, none, required, or"),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "must be 'text', 'json_object' or 'json_schema'",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be given"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not have 'tools'"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, object], param: str, words: str) -> None:
    error = refused(ChatQuestion, CHAT | fields)
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("body", [b"", b"[1", b"[]", b'{"n": NaN}', b"\xff", b"[" * 10000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    assert "JSON" in refused(CompletionQuestion, body).message


def test_long_values_are_not_repeated() -> None:
    assert len(refused(CompletionQuestion, COMPLETION | {"model": [0] * 1000}).message) < 100


def test_the_longest_length_may_be_given_under_both_names() -> None:
    body = json.dumps(CHAT | {"max_tokens": 3, "max_completion_tokens": 3}).encode()
    assert read_question(body, ChatQuestion).longest == 3


def test_fields_that_ask_for_nothing_are_taken() -> None:
    nothing = {"best_of": 1, "echo": False, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None, "stop": None}
    bare = read_question(json.dumps(COMPLETION).encode(), CompletionQuestion)
    assert read_question(json.dumps(COMPLETION | nothing).encode(), CompletionQuestion) == bare
    message = {"role": "user", "content": "Hi", "tool_calls": None, "refusal": None}
    chat = CHAT | {"messages": [message], "response_format": {"type": "text"}}
    harmless = {"metadata": {"a": "b"}, "safety_identifier": "x", "store": True, "user": "u", "prompt_cache_key": "k"}
    assert read_question(json.dumps(chat | harmless).encode(), ChatQuestion) == read_question(
        json.dumps(CHAT).encode(), ChatQuestion
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_text_or_tokens_one_or_several(prompt: object, prompts: list[object]) -> None:
    assert read_question(json.dumps(COMPLETION | {"prompt": prompt}).encode(), CompletionQuestion).prompts == prompts


def test_parts_of_a_message_are_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = CHAT | {"messages": [{"role": "user", "name": "Eve", "content": parts}]}
    (message,) = read_question(json.dumps(body).encode(), ChatQuestion).messages
    assert checked(message.to_json()) == {"role": "user", "name": "Eve", "content": "a\nb"}
