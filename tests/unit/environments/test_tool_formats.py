"""Calls of tools are read from what a policy wrote, whatever it wrote."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from leaderless.environments.tools.calls import Call
from leaderless.environments.tools.formats import FORMATS

ADD = Call("add", {"a": 1, "b": [2, {"c": "x}y"}]})
ONE = json.dumps({"name": "add", "arguments": ADD.arguments})
HERMES = f"<tool_call>{ONE}</tool_call>"
LLAMA = json.dumps({"name": "add", "parameters": ADD.arguments})
XML = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, 3]\n</parameter>\n</function>"
DIGITS = "9" * 5000
TEXTS = Call("add", {"a": "1", "b": "[2, 3]"}, is_text=True)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "4<|im_end|>", "4", []),
        ("hermes", f"<tool_call>\n{ONE}\n</tool_call><|im_end|>\n", "", [ADD]),
        ("hermes", f"Both:\n{HERMES}\n{HERMES} done", "Both:\ndone", [ADD, ADD]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [Call("now")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [Call("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "say", "arguments": {"x": "\n"}}</tool_call>', "", [Call("say", {"x": "\n"})]),
        ("hermes", f"Add: {HERMES}</think>No.", f"Add: {HERMES}</think>No.", []),
        ("llama", "4<|eot_id|>", "4", []),
        ("llama", f"<|python_tag|>{LLAMA}<|eom_id|>", "", [ADD]),
        ("llama", f"{LLAMA}<|eot_id|>", "", [ADD]),
        ("llama", f"{LLAMA}; {LLAMA}", "", [ADD, ADD]),
        ("llama", '{"answer": 4}', '{"answer": 4}', []),
        ("llama", f"So: {LLAMA}", f"So: {LLAMA}", []),
        ("qwen3_coder", "4", "4", []),
        ("qwen3_coder", f"Now\n<tool_call>\n{XML}\n</tool_call><|im_end|>", "Now", [TEXTS]),
        ("qwen3_coder", f"{XML}<tool_call>{XML}</tool_call>", "", [TEXTS, TEXTS]),
        ("qwen3_coder", "<function=now>\n</function>", "", [Call("now", is_text=True)]),
        ("mistral", "4</s>", "4", []),
        ("mistral", f"[TOOL_CALLS] [{ONE}, {ONE}]</s>", "", [ADD, ADD]),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD.arguments)}[TOOL_CALLS]now{{}}", "", [ADD, Call("now")]),
    ],
)  # fmt: skip
def test_calls_are_read(kind, text, content, calls):
    read = FORMATS[kind](text)
    assert list(read.calls) == calls
    assert read.content == content


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("hermes", f"<tool_call>{ONE}", "not closed by </tool_call>"),
        ("hermes", '<tool_call>{"name": "add", </tool_call>', "a JSON object"),
        ("hermes", "<tool_call>[1]</tool_call>", "not [1]"),
        ("hermes", '<tool_call>{"title": "add"}</tool_call>', "lacks 'name'"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a JSON object, not [1]"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1,"}</tool_call>', "arguments must be a JSON object"),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "nested too deeply"),
        ("hermes", f"""<tool_call>{{"name": "add", "arguments": {{"a": {DIGITS}}}}}</tool_call>""", "a JSON object"),
        ("llama", '<|python_tag|>brave.call(query="x")', "a JSON object"),
        ("llama", '{"name": "add", "parameters": {', "a JSON object"),
        ("llama", f"{LLAMA} and {LLAMA}", "`;` must separate calls"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "not closed by </function>"),
        ("qwen3_coder", "<tool_call>{}</tool_call>", "must be followed by <function=NAME>"),
        ("qwen3_coder", "<function=add><parameter=a>1</function>", "arguments must be written as <parameter=NAME>"),
        ("qwen3_coder", "<function=></function>", "must have a name"),
        ("mistral", "[TOOL_CALLS] [{", "must be followed by a JSON list"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_why(kind, text, problem):
    calls = FORMATS[kind](text).calls
    assert problem in calls[-1].problem
    assert len(calls[-1].problem) < 400


def test_a_wrong_call_does_not_hide_those_around_it():
    good = f"<tool_call>{ONE}</tool_call>"
    calls = FORMATS["hermes"](f"{good}<tool_call>oops</tool_call>{good}").calls
    assert [bool(call.problem) for call in calls] == [False, True, False]
    xml = f"<tool_call>{XML}</tool_call>"
    calls = FORMATS["qwen3_coder"](f"{xml}<tool_call>oops</tool_call>{xml}").calls
    assert [bool(call.problem) for call in calls] == [False, True, False]


MARKS = "<tool_call> </tool_call> <function= </function> <parameter= </parameter> [TOOL_CALLS] [ARGS] <|python_tag|>"
PIECES = st.sampled_from([*MARKS.split(), "</think>", "<|im_end|>", "add", '"name"', " ", "\n", *'>:;,{}[]"1'])


@pytest.mark.parametrize("kind", FORMATS)
@given(pieces=st.lists(PIECES, max_size=30))
@example(pieces=["{"] * 20_000)
@example(pieces=[" "] * 20_000)
@example(pieces=["<function="] * 2_000)
def test_no_text_breaks_a_reader(kind, pieces):
    calls = FORMATS[kind]("".join(pieces)).calls
    assert all(call.name or call.problem for call in calls)
    assert FORMATS[kind]("".join(pieces)).message()["role"] == "assistant"
