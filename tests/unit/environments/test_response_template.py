"""Calls are read by the response template of a tokenizer that has one, and its tokens stay as they were sampled."""

from __future__ import annotations

from typing import Any

import pytest
from tests.templates import CHATML, tokenizer_with

from leaderless.config import RecipeError
from leaderless.environments.tools.calls import Call
from leaderless.environments.tools.formats import find_reader, marks_of, read_hermes
from leaderless.environments.tools.response_template import TemplateReader

LIST = CHATML.replace(
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
    "{% for c in m.tool_calls or [] %}<calls>[{{ c.function.name }}("
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})]</calls>{% endfor %}",
)
"""Calls as LFM2 writes them, which no built-in format reads."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "page": {"type": "integer"}}},
    },
}
HEAD: dict[str, Any] = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n"}
THINK = {"thinking": {"open": "<think>", "close": "</think>"}, "content": {"close": "<|im_end|>"}}
JSON_CALLS = HEAD | {
    "fields": THINK
    | {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        }
    }
}
LIST_CALLS = HEAD | {
    "fields": THINK
    | {
        "tool_calls": {
            "open": ["<calls>", "<call>"],
            "close": "</calls>",
            "content": "python-call-list",
            "transform_each": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        }
    }
}


def reader(chat_template: str, response_template: object) -> Any:
    tokenizer = tokenizer_with(chat_template)
    tokenizer.response_template = response_template
    return find_reader("auto", tokenizer, [TOOL])  # type: ignore[arg-type]


def test_a_format_that_is_not_built_in_is_read_by_the_response_template() -> None:
    with pytest.raises(RecipeError, match="unknown format"):
        reader(LIST, None)
    read = reader(LIST, LIST_CALLS)
    assert isinstance(read, TemplateReader)
    assert marks_of(read) == ("<calls>", "<call>")
    found = read('See: <calls>[look_up(word="a b"), look_up(word="c", page=2)]</calls><|im_end|>')
    assert list(found.calls) == [Call("look_up", {"word": "a b"}), Call("look_up", {"word": "c", "page": 2})]
    assert found.content.strip() == "See:"
    assert read("It is blue.<|im_end|>").content == "It is blue."


def test_the_response_template_comes_before_the_built_in_formats() -> None:
    assert reader(CHATML, None) is read_hermes
    read = reader(CHATML, JSON_CALLS)
    assert isinstance(read, TemplateReader)
    call = '<tool_call>{"name": "look_up", "arguments": {"word": "7", "page": "7"}}</tool_call>'
    found = read(f"<think>hm</think>Now {call} {call}<|im_end|>")
    assert list(found.calls) == [Call("look_up", {"word": "7", "page": 7})] * 2, "types are those of the schema"
    assert found.content.startswith("<think>hm</think>Now")


def test_a_response_template_that_reads_something_else_is_left_alone() -> None:
    assert reader(CHATML, LIST_CALLS) is read_hermes
    assert reader(CHATML, HEAD | {"fields": THINK}) is read_hermes


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>{"name": "look_up"', "the response template cannot read it: json parser could not parse"),
        ('<tool_call>{"title": "x"}</tool_call>', "a call lacks 'name'"),
        ('<tool_call>{"name": "look_up", "arguments": [1]}</tool_call>', "must be a JSON object, not [1]"),
        ('<tool_call>{"name": "look_up", "arguments": "1,"}</tool_call>', "arguments must be a JSON object ("),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "the response template cannot read it"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, problem: str) -> None:
    calls = reader(CHATML, JSON_CALLS)(text).calls
    assert problem in calls[-1].problem
    assert len(calls[-1].problem) < 500
