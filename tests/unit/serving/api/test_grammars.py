"""Which tokens may come next by a JSON schema, or by the format of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.templates import CHATML, tokenizer_with
from tests.unit.serving.api.sites import WORD_TOOL

from leaderless.environments.tools.formats import read_hermes, read_llama, read_mistral
from leaderless.rollout.shaping import Grammar
from leaderless.serving.api.grammars import Grammars
from leaderless.serving.http_server import ApiError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OTHER: Any = {"type": "function", "function": {"name": "stop"}}


def with_marks() -> Any:
    """A tokenizer with tokens for the marks around calls, as Qwen's has them."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, {tokenizer.eos_token_id}, len(tokenizer) + 5)


def is_whole(grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Check that a text may be written token by token, and whether it may end there."""
    state = grammar.begin()
    for token in tokenizer.encode(text, add_special_tokens=False):
        allowed = state.allowed()
        assert len(allowed) == len(tokenizer) + 5
        if not allowed[token]:
            return False
        state.take(token)
    return bool(state.allowed()[tokenizer.eos_token_id])


@pytest.mark.parametrize("make", [lambda: tokenizer_with(CHATML), with_marks])
def test_a_schema_allows_what_follows_it(make: Any) -> None:
    tokenizer = make()
    grammar = grammars(tokenizer).compile(SCHEMA, "response_format")
    for text in ('{"a": 12}', '{"a":-3}', '{\n  "a" : 0\n}'):
        assert is_whole(grammar, tokenizer, text), text
    for text in ('{"a": 12', '{"a": "x"}', '{"b": 1}', "12", "", '{"a": 1}}', "{" + " " * 50):
        assert not is_whole(grammar, tokenizer, text), text
    assert is_whole(grammar, tokenizer, '{"a": 7}'), "responses do not share a state"


@pytest.mark.parametrize("make", [lambda: tokenizer_with(CHATML), with_marks])
def test_calls_are_enforced_in_the_format_of_the_template(make: Any) -> None:
    tokenizer = make()
    call = json.dumps({"name": "look_up", "arguments": {"word": "ab"}})
    one = f"<tool_call>\n{call}\n</tool_call>"
    tools = [WORD_TOOL, OTHER]
    single = grammars(tokenizer).compile_calls(read_hermes, tools, may_repeat=False)
    several = grammars(tokenizer).compile_calls(read_hermes, tools, may_repeat=True)
    for grammar in (single, several):
        assert is_whole(grammar, tokenizer, one)
        assert is_whole(grammar, tokenizer, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>')
        for text in ("No.", call, one.replace("look_up", "look"), one.replace('"ab"', "1"), one[:-1], f"{one} "):
            assert not is_whole(grammar, tokenizer, text), text
    assert is_whole(several, tokenizer, f"{one}\n{one}")
    assert not is_whole(single, tokenizer, f"{one}\n{one}")
    llama = grammars(tokenizer).compile_calls(read_llama, tools, may_repeat=True)
    assert is_whole(llama, tokenizer, json.dumps({"name": "look_up", "parameters": {"word": "ab"}}))
    with pytest.raises(ApiError, match="in the formats hermes, llama, and the chat template writes another one"):
        grammars(tokenizer).compile_calls(read_mistral, tools, may_repeat=True)


def test_a_response_that_cannot_go_on_ends() -> None:
    tokenizer = with_marks()
    state = grammars(tokenizer).compile(SCHEMA, "response_format").begin()
    state.take(tokenizer.encode("x")[0])  # which was not allowed
    assert state.allowed().nonzero().flatten().tolist() == [tokenizer.eos_token_id]
