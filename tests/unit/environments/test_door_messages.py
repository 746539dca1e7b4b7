"""Programs ask the policy with Anthropic's client; what was sampled stays as it was sampled."""

from __future__ import annotations

import json

import anthropic
import pytest
from tests.unit.environments.led import END, lead, text_of
from tests.unit.environments.test_programs import TOOL as CHAT_TOOL
from tests.unit.environments.test_programs import trained_tokens

from leaderless.environments.programs import Chat
from leaderless.environments.protocol import Task

TOOL = {
    "name": "look_up",
    "description": "Look up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": ["string", "null"]}}, "default": None},
}


def client_of(chat: Chat) -> anthropic.AsyncAnthropic:
    # The client adds the version to its paths.
    return anthropic.AsyncAnthropic(base_url=chat.base_url.removesuffix("/v1"), api_key=chat.api_key, max_retries=0)


def look_up(context: str) -> str:
    arguments = {"word": "ab", "share": 1.0, "size": 2**53 + 1, "none": None}
    call = f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': arguments})}</tool_call>"
    return f"blue{END}" if context.count("seventh") == 2 else f"Wait.\n{call}{END}"


def as_javascript(value: object) -> object:
    """What is left of numbers in a program that is written in JavaScript."""
    if isinstance(value, dict):
        return {key: as_javascript(one) for key, one in value.items()}
    if isinstance(value, list):
        return [as_javascript(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and float(value).is_integer():
        return int(float(value))
    return value


@pytest.mark.parametrize("form", ["object", "dictionary", "javascript", "stream"])
def test_an_agent_with_the_anthropic_package_is_one_sample_of_what_was_sampled(form: str) -> None:
    async def agent(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            messages: list[object] = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
            for turn in range(5):
                # Agents move the marks of a cache from turn to turn; these are not part of the conversation.
                cache = {"cache_control": {"type": "ephemeral"}} if turn % 2 else {}
                asked = {
                    "model": "claude-x",
                    "max_tokens": 150,
                    "system": [{"type": "text", "text": "Be brief.", **cache}],
                    "messages": messages,
                    "tools": [TOOL | cache],
                    "extra_body": {"temperature": 1.0},
                    "metadata": {"user_id": f"u{turn}"},
                    "thinking": {"type": "disabled"},
                }
                if form == "stream":
                    async with client.messages.stream(**asked) as stream:  # type: ignore[arg-type]
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**asked)  # type: ignore[call-overload]
                given = [block.model_dump() for block in answer.content]
                forms = {"object": answer.content, "javascript": as_javascript(given)}
                messages.append({"role": "assistant", "content": forms.get(form, given)})
                calls = [block for block in answer.content if block.type == "tool_use"]
                if not calls:
                    assert answer.stop_reason == "end_turn"
                    return float(answer.content[0].text == "blue")
                assert answer.stop_reason == "tool_use"
                assert [block.type for block in answer.content] == ["text", "tool_use"]
                assert calls[0].input == {"word": "ab", "share": 1.0, "size": 2**53 + 1, "none": None}
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "seventh"}]}
                    for call in calls
                ]
                messages.append({"role": "user", "content": results})
        return -1.0

    (episode,), engine = lead(agent, look_up, max_tokens=3000)
    assert not episode.error
    assert len(list(episode.trace.samples())) == 1
    assert trained_tokens(episode) == engine.said
    assert episode.trace.said()[-1].said.reward == 1.0
    context = text_of(episode.trace.samples()[0].tokens)
    assert context.count("<|im_start|>tool\nseventh<|im_end|>\n") == 2
    assert context.index("Be brief.") < context.index("?")


def test_the_context_is_that_of_the_same_chat() -> None:
    """The same conversation in both APIs is the same context, and so one node with two answers."""

    async def solve(task: Task, chat: Chat) -> float:
        import openai

        call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "x"}'}}
        chat_tool = {
            "type": "function",
            "function": {"name": "look_up", "description": "Look up.", "parameters": TOOL["input_schema"]},
        }
        async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
            await client.chat.completions.create(
                model="m",
                messages=[
                    {"role": "system", "content": "S"},
                    {"role": "user", "content": "U"},
                    {"role": "assistant", "content": "A", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": "R"},
                    {"role": "user", "content": "V"},
                ],
                tools=[chat_tool],
            )
        async with client_of(chat) as client:
            use = {"type": "tool_use", "id": "c1", "name": "look_up", "input": {"word": "x"}}
            result = {"type": "tool_result", "tool_use_id": "c1", "content": "R"}
            thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
            await client.messages.create(
                model="m",
                max_tokens=100,
                system="S",
                messages=[
                    {"role": "user", "content": "U"},
                    {"role": "assistant", "content": [thought, {"type": "text", "text": "A"}, use]},
                    {"role": "user", "content": [result, {"type": "text", "text": "V"}]},
                ],
                tools=[TOOL],
            )
        return 1.0

    (episode,), _ = lead(solve)
    assert not episode.error
    first, second = episode.trace.said()
    assert first.parent is second.parent


def test_events_of_a_stream_come_in_the_order_of_the_api() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            asked = {"model": "m", "max_tokens": 150, "messages": [{"role": "user", "content": "?"}], "tools": [TOOL]}
            events = [event async for event in await client.messages.create(**asked, stream=True)]
            assert [event.type for event in events] == [
                "message_start",
                *("content_block_start", "content_block_delta", "content_block_stop"),
                *("content_block_start", "content_block_delta", "content_block_stop"),
                *("message_delta", "message_stop"),
            ]
            assert [event.index for event in events[1:7]] == [0, 0, 0, 1, 1, 1]
            assert events[0].message.usage.input_tokens > 0
            assert (events[1].content_block.type, events[4].content_block.type) == ("text", "tool_use")
            assert (events[2].delta.type, events[5].delta.type) == ("text_delta", "input_json_delta")
            assert events[4].content_block.input == {}
            assert json.loads(events[5].delta.partial_json)["word"] == "ab"
            assert events[7].delta.stop_reason == "tool_use"
            assert events[7].usage.output_tokens > 1
            async with client.messages.stream(**asked) as stream:
                assert "".join([text async for text in stream.text_stream]) == "Wait."
        return 1.0

    (episode,), _ = lead(solve, look_up)
    assert not episode.error


def test_an_answer_says_why_it_has_ended() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "?"}]}
            cut = await client.messages.create(**asked, max_tokens=2)
            assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "on")
            stopped = await client.messages.create(**asked, max_tokens=50, stop_sequences=["two", "three"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
            assert stopped.content[0].text == "one "
            ended = await client.messages.create(**asked, max_tokens=50, extra_body={"return_token_ids": True})
            assert (ended.stop_reason, ended.stop_sequence, ended.content[0].text) == (
                "end_turn",
                None,
                "one two three",
            )
            assert text_of(ended.token_ids) == f"one two three{END}"
            assert ended.usage.input_tokens == len(ended.prompt_token_ids)
            assert ended.usage.output_tokens == len(ended.token_ids)
            counted = await client.messages.count_tokens(**asked)
            assert counted.input_tokens == ended.usage.input_tokens
            assert [model.id async for model in client.models.list()] == ["policy"]
        return 1.0

    (episode,), _ = lead(solve, lambda _: f"one two three{END}")
    assert not episode.error
    assert len(episode.trace.said()) == 3, "counting asks nothing"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, "temperature=0.7 differs from the recipe's 1"),
        ({"tool_choice": {"type": "any"}, "tools": [TOOL]}, "no call can be enforced in training"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [CHAT_TOOL]}, "tools.0"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "not prefilled"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "type 'document', which is not read"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "type 'image', which is not read"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"system": [{"type": "image"}]}, "system"),
    ],
)
def test_what_cannot_be_answered_is_an_error_in_the_words_of_the_api(fields: dict[str, object], words: str) -> None:
    async def solve(task: Task, chat: Chat) -> float:
        await chat.ask("first")
        async with client_of(chat) as client:
            question = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
            with pytest.raises(anthropic.BadRequestError, match=words) as caught:
                await client.post("/v1/messages", body=question | fields, cast_to=dict)
            assert caught.value.body["type"] == "error"
            assert caught.value.type == "invalid_request_error"
        return 1.0

    (episode,), _ = lead(solve)
    assert not episode.error


def test_limits_and_keys_have_the_errors_of_the_api() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
            await client.messages.create(**asked)
            with pytest.raises(anthropic.BadRequestError, match="has answered 1 times") as caught:
                await client.messages.create(**asked)
            assert caught.value.error_code == "max_turns"
            other = client.with_options(api_key="wrong")
            with pytest.raises(anthropic.AuthenticationError, match="key is missing or wrong") as refused:
                await other.messages.create(**asked)
            assert refused.value.type == "authentication_error"
        return 1.0

    (episode,), _ = lead(solve, max_turns=1)
    assert not episode.error


def test_a_command_finds_the_address_for_clients_of_anthropic() -> None:
    question = '{"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "one"}]}'
    script = f"""
        set -e
        answer=$(curl --silent --show-error --fail-with-body -H "X-Api-Key: $ANTHROPIC_API_KEY" \\
            -H 'Content-Type: application/json' -d '{question}' "$ANTHROPIC_BASE_URL/v1/messages")
        [[ $answer == *'"type":"message"'*'"text":"0"'* ]]
        echo '{{"reward": 1}}'
    """
    (episode,), _ = lead(type="command", options={"command": ["bash", "-c", script]})
    assert not episode.error
    assert len(episode.trace.said()) == 1
