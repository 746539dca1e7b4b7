"""What a served model is asked with the official clients: tools, and Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from tests.unit.serving.api.sites import WORD_TOOL, TalkingSite, talking

CALL = '<tool_call>{"name": "look_up", "arguments": {"word": "ab"}}</tool_call>'
TOOL: Any = {"name": "look_up", "description": "Look up.", "input_schema": WORD_TOOL["function"]["parameters"]}  # type: ignore[index]


def say(prompt: str) -> str:
    """Call a tool until it has answered, unless something else is wanted."""
    asked = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    answers = {
        "broken": "So: <tool_call>{nothing}</tool_call>!",
        "less": "a < b <too  ",
        "twice": f"{CALL}\n{CALL}",
        "one": "one two three",
    }
    return answers.get(asked, "It is blue." if "seventh" in prompt else f"Let me see.\n{CALL}")


@pytest.fixture(scope="module")
def site() -> Iterator[TalkingSite]:
    with talking(say) as site:
        yield site


def chat(site: TalkingSite, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return site.openai.chat.completions.create(model="m", messages=messages, **options)


def test_a_served_model_calls_tools_and_is_told_their_results(site: TalkingSite) -> None:
    messages: Any = [{"role": "user", "content": "?"}]
    tools: Any = [WORD_TOOL]
    (choice,) = site.openai.chat.completions.create(model="m", messages=messages, tools=tools).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"word": "ab"})  # type: ignore[union-attr]
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "the seventh"}]
    (choice,) = site.openai.chat.completions.create(model="m", messages=messages, tools=tools).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It is blue.")


@pytest.mark.parametrize("text", ["?", "broken", "less", "twice", "one"])
def test_a_stream_with_tools_adds_up_to_the_whole(site: TalkingSite, text: str) -> None:
    (whole,) = chat(site, text, tools=[WORD_TOOL]).choices
    pieces = [piece.choices[0] for piece in chat(site, text, tools=[WORD_TOOL], stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == (whole.message.content or "")
    calls = [call for piece in pieces for call in piece.delta.tool_calls or []]
    assert [call.index for call in calls] == list(range(len(whole.message.tool_calls or [])))
    assert [call.function for call in calls] == [
        type(call.function)(**one.function.model_dump())
        for call, one in zip(calls, whole.message.tool_calls or [], strict=True)
    ]
    assert pieces[-1].finish_reason == whole.finish_reason


def test_text_before_a_call_is_streamed_at_once(site: TalkingSite) -> None:
    texts = [piece.choices[0].delta.content for piece in chat(site, "?", tools=[WORD_TOOL], stream=True)]
    assert len([text for text in texts if text]) > 5
    plain = [piece.choices[0].delta.content for piece in chat(site, "?", stream=True)]
    assert "".join(text or "" for text in plain) == f"Let me see.\n{CALL}", "without tools it is text"
    chosen = chat(site, "?", tools=[WORD_TOOL], tool_choice="none").choices[0].message
    assert (chosen.content, chosen.tool_calls) == (f"Let me see.\n{CALL}", None)


def test_tools_that_the_template_cannot_show_are_refused(site: TalkingSite) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tools\.0: must be") as caught:
        chat(site, "?", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools.0"


def test_messages_with_tools_go_on_with_blocks_as_they_were_given(site: TalkingSite) -> None:
    client, messages = site.anthropic, [{"role": "user", "content": "?"}]
    asked: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "system": "Be brief."}
    first = client.messages.create(messages=messages, **asked)  # type: ignore[arg-type]
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["text", "tool_use"]
    call = first.content[1]
    assert (call.name, call.input) == ("look_up", {"word": "ab"})  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "the seventh"}  # type: ignore[union-attr]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]  # type: ignore[dict-item]
    second = client.messages.create(messages=messages, **asked)  # type: ignore[arg-type]
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is blue.")  # type: ignore[union-attr]
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("text", ["?", "broken", "less", "twice", "one"])
def test_streamed_messages_add_up_to_the_whole(site: TalkingSite, text: str) -> None:
    asked: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "messages": [{"role": "user", "content": text}]}
    whole = site.anthropic.messages.create(**asked)
    with site.anthropic.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    own = [block.model_dump(exclude={"id"}, exclude_none=True) for block in streamed.content]
    for block in own:
        block.pop("parsed_output", None)
    assert own == [block.model_dump(exclude={"id"}, exclude_none=True) for block in whole.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_events_of_messages_come_one_by_one_in_the_order_of_the_api(site: TalkingSite) -> None:
    asked: Any = {"model": "m", "max_tokens": 200, "tools": [TOOL], "messages": [{"role": "user", "content": "?"}]}
    with site.anthropic.messages.with_streaming_response.create(stream=True, **asked) as response:
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [body["type"] for body in bodies]
    num_deltas = names.index("content_block_stop") - 3
    assert num_deltas > 5
    block = ("content_block_start", "content_block_delta", "content_block_stop")
    deltas = ["content_block_delta"] * num_deltas
    assert names == [
        *("message_start", "content_block_start", "ping", *deltas, "content_block_stop"),
        *block,
        *("message_delta", "message_stop"),
    ]
    assert bodies[0]["message"]["stop_reason"] is None
    assert bodies[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_stop_sequence_is_named_and_not_sent(site: TalkingSite) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}], "stop_sequences": ["four", "two"]}
    reply = site.anthropic.messages.create(max_tokens=200, **asked)
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "two")
    assert reply.content[0].text == "one "  # type: ignore[union-attr]
    cut = site.anthropic.messages.create(max_tokens=2, **asked)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)


def test_an_answer_may_be_asked_for_that_is_longer_than_there_is_room(site: TalkingSite) -> None:
    asked: Any = {"model": "m", "max_tokens": 100_000, "messages": [{"role": "user", "content": "one"}]}
    assert site.anthropic.messages.create(**asked).stop_reason == "end_turn"
    asked["messages"] = [{"role": "user", "content": "x" * 3930}]
    full = site.anthropic.messages.create(**asked)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == 4000
    with site.anthropic.messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_reason == "model_context_window_exceeded"


def test_tokens_of_messages_are_counted_as_the_model_reads_them(site: TalkingSite) -> None:
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}], "system": "S", "tools": [TOOL]}
    counted = site.anthropic.messages.count_tokens(**asked).input_tokens
    assert counted == site.anthropic.messages.create(max_tokens=5, **asked).usage.input_tokens
    less = site.anthropic.messages.count_tokens(**{**asked, "tools": []}).input_tokens
    assert less < counted


def test_errors_of_messages_are_in_the_words_of_the_api(site: TalkingSite) -> None:
    client = site.anthropic
    asked: Any = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
    with pytest.raises(anthropic.NotFoundError, match="only 'm'") as caught:
        client.messages.create(**{**asked, "model": "other"})
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="may have 4000 together") as long:
        client.messages.create(**{**asked, "messages": [{"role": "user", "content": "x" * 4000}]})
    assert long.value.error_code == "context_length_exceeded"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text alone"):
        client.messages.create(**{**asked, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="answers are not prefilled"):
        client.messages.create(**{**asked, "messages": [*asked["messages"], {"role": "assistant", "content": "b"}]})
