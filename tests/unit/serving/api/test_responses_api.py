"""What a served model is asked with OpenAI's client for responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.unit.serving.api.sites import WORD_TOOL, TalkingSite, talking

from leaderless.serving.api.openai_responses import ResponseMemory
from leaderless.serving.http_server import ApiError

CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "ab"}}</tool_call>'
TOOL: Any = {"type": "function", **WORD_TOOL["function"]}  # type: ignore[dict-item]


def say(prompt: str) -> str:
    """Call a tool until it has answered, unless something else is wanted; or count what has been said."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    count = prompt.count("<|im_start|>assistant\n") - 1
    answers = {"nothing": "", "one": "one two three", "only": f"\n\n{CALL}", "count": f"{count}", "all": prompt}
    return answers.get(asked, "It is blue." if "seventh" in prompt else f"Let me see.\n{CALL}\n{CALL}")


@pytest.fixture(scope="module")
def site() -> Iterator[TalkingSite]:
    with talking(say) as site:
        yield site


def ask(site: TalkingSite, given: Any, **options: Any) -> Any:
    return site.openai.responses.create(model="m", input=given, **options)


def test_a_response_calls_tools_and_goes_on_with_items_as_they_were_given(site: TalkingSite) -> None:
    first = ask(site, "?", tools=[TOOL], instructions="Be brief.", metadata={"a": "b"}, user="u", reasoning=None)
    assert (first.status, first.output_text, first.instructions) == ("completed", "Let me see.", "Be brief.")
    assert (first.metadata, first.error, first.incomplete_details) == ({"a": "b"}, None, None)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    calls = first.output[1:]
    assert [json.loads(call.arguments) for call in calls] == [{"word": "ab"}] * 2
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "the seventh"} for call in calls]
    given = [{"role": "user", "content": "?"}, *first.output, *results]
    options: Any = {"tools": [TOOL], "instructions": "Be brief.", "extra_body": {"return_token_ids": True}}
    second = ask(site, given, **options)
    assert second.output_text == "It is blue."
    third = ask(site, results, previous_response_id=first.id, **options)
    assert third.output_text == "It is blue."
    assert third.prompt_token_ids == second.prompt_token_ids
    assert third.usage.input_tokens == len(third.prompt_token_ids)
    assert third.usage.total_tokens == third.usage.input_tokens + len(third.token_ids)
    assert third.previous_response_id == first.id


def test_the_prompt_is_that_of_the_same_chat(site: TalkingSite) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "S"}]},
        {"role": "user", "content": "U"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "look_up", "arguments": '{"word": "x"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "R"}]},
    ]
    call: Any = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
    messages: Any = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "look_up", "content": "R"},
    ]
    extra = {"return_token_ids": True}
    chat: Any = site.openai.chat.completions.create(model="m", messages=messages, tools=[WORD_TOOL], extra_body=extra)  # type: ignore[list-item]
    assert ask(site, items, tools=[TOOL], extra_body=extra).prompt_token_ids == chat.prompt_token_ids


@pytest.mark.parametrize("text", ["?", "one", "only", "nothing"])
def test_a_stream_is_what_the_client_puts_together(site: TalkingSite, text: str) -> None:
    whole = ask(site, text, tools=[TOOL])
    with site.openai.responses.stream(model="m", input=text, tools=[TOOL]) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()
    assert final.output_text == whole.output_text
    calls = [(item.name, item.arguments) for item in whole.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in final.output if item.type == "function_call"] == calls
    assert final.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    deltas = ["output_text.delta"] * num_deltas
    begin, end = ("output_item.added", "content_part.added"), ("output_text.done", "content_part.done")
    message = [*begin, *deltas, *end, "output_item.done"] if whole.output[0].type == "message" else []
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *message, *call * len(calls), "completed"]
    assert num_deltas > 5 or text in {"only", "nothing"}
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == list(
        range(len(whole.output))
    )


def test_log_probabilities_are_those_of_the_tokens(site: TalkingSite) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"]}
    whole = ask(site, "one", **asked)
    (content,) = whole.output[0].content
    assert [one.logprob for one in content.logprobs] == [-0.5] * whole.usage.output_tokens
    with site.openai.responses.stream(model="m", input="one", **asked) as stream:
        pieces: Any = [event for event in stream if event.type == "response.output_text.delta"]
    joined = [one.token for piece in pieces for one in piece.logprobs]
    assert joined == [one.token for one in content.logprobs][: len(joined)]
    assert "".join(joined).startswith("one two three")


def test_a_response_that_was_cut_is_incomplete(site: TalkingSite) -> None:
    cut = ask(site, "one", max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "one")
    with site.openai.responses.stream(model="m", input="one", max_output_tokens=3) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_conversation_goes_on_by_its_name_without_instructions(site: TalkingSite) -> None:
    name = None
    for turn in range(3):
        reply = ask(site, "count", previous_response_id=name)
        assert reply.output_text == str(turn)
        name = reply.id
    branch = ask(site, "count", previous_response_id=name)
    assert branch.output_text == ask(site, "count", previous_response_id=name).output_text == "3"
    shown = ask(site, "all", previous_response_id=ask(site, "one", instructions="Shout.").id)
    assert "Shout." not in shown.output_text
    assert "one two three" in shown.output_text
    with site.openai.responses.stream(model="m", input="count", previous_response_id=name) as stream:
        streamed = stream.get_final_response()
    assert ask(site, "count", previous_response_id=streamed.id).output_text == "4"


def test_what_is_not_kept_is_named(site: TalkingSite) -> None:
    forgotten = ask(site, "one", store=False).id
    for name in (forgotten, "resp_0"):
        with pytest.raises(openai.BadRequestError, match="is not kept") as caught:
            ask(site, "count", previous_response_id=name)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_kept_is_bounded() -> None:
    memory = ResponseMemory(most=2, most_characters=300)
    message = {"role": "user", "content": "x" * 40}
    for name in "abc":
        memory.keep(name, [message])
    assert memory.messages("b") == memory.messages("c") == [message]
    with pytest.raises(ApiError, match="older than the 2 newest"):
        memory.messages("a")
    memory.keep("d", [message] * 2)
    with pytest.raises(ApiError):
        memory.messages("b")
    assert memory.messages("d") == [message] * 2
    memory.keep("e", [message] * 9)
    for name in "cde":
        with pytest.raises(ApiError):
            memory.messages(name)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"background": True}, "background", "nobody would ask"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"truncation": "auto"}, "truncation", "nothing is left out"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "type 'item_reference', which is not read"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input.0",
            "part of the type 'input_file'",
        ),
        ({"input": []}, "input", "must end with an item"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "input", "not prefilled"),
        ({"input": 3}, "input", "must be a text or a list of items"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_tokens": 5}, "max_tokens", "unknown field"),
        ({"input": "x" * 5000}, "input", "may have 4000 together"),
    ],
)
def test_a_wrong_field_is_named(site: TalkingSite, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        site.openai.post("/responses", body={"model": "m", "input": "a"} | fields, cast_to=dict)  # type: ignore[type-var]
    assert caught.value.param == param
    assert words in caught.value.message
