"""Synthetic conversations by which a chat template is examined."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaderless.base.values import Json

Message = Mapping[str, Json]

TOOL_NAME = "add_numbers"
TOOLS: tuple[Json, ...] = (
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    },
)
SYSTEM: Message = {"role": "system", "content": "Answer in one sentence."}
THINK, END_OF_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class Conversation:
    """A conversation that ends where the assistant is to write.

    Attributes:
        name: Name for people.
        messages: Messages, in Hugging Face's format.
        tools: Descriptions of the tools that the assistant may call; empty for none.
    """

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()

    def turns(self) -> list[int]:
        """Places of the assistant's messages, and of the one that would be next."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        return [*places, len(self.messages)]


def chat(*, has_system: bool, has_reasoning: bool) -> Conversation:
    """Three questions, of which two have been answered."""
    messages = [*_system(has_system=has_system)]
    for number in (1, 2):
        messages += [_question(number), _answer(number, has_reasoning=has_reasoning)]
    name = "answers with reasoning" if has_reasoning else "answers"
    return Conversation(name, (*messages, _question(3)))


def tool_chat(*, has_system: bool, has_reasoning: bool) -> Conversation:
    """Two questions, with a tool call for each and the answer to the first."""
    messages = [*_system(has_system=has_system)]
    for number in (1, 2):
        messages += [_question(number), _call(number, has_reasoning=has_reasoning), _result(number)]
        if number == 1:
            messages.append(_answer(number, has_reasoning=has_reasoning))
    name = "tool calls with reasoning" if has_reasoning else "tool calls"
    return Conversation(name, tuple(messages), TOOLS)


def content_of(message: Message) -> str:
    """The text of a message."""
    text = message["content"]
    assert isinstance(text, str)
    return text


def visible_text(message: Message) -> str:
    """The text by which a message is found in a rendering: its content without reasoning, or the name of a tool."""
    return TOOL_NAME if "tool_calls" in message else content_of(message).rpartition(END_OF_THINK)[2].strip()


def reasoning_of(message: Message) -> str:
    """The reasoning in a message of the assistant, without its marks; empty if there is none."""
    before, mark, _ = content_of(message).partition(END_OF_THINK)
    return before.removeprefix(THINK).strip() if mark else ""


def without_reasoning(text: str) -> str:
    """A text without its blocks of reasoning, and without the white space after them."""
    return re.sub(f"{THINK}.*?{END_OF_THINK}\\s*", "", text, flags=re.DOTALL)


def is_reasoning_open(prompt: str) -> bool:
    """Whether a prompt ends with the beginning of reasoning, so that each answer has some."""
    return prompt.rstrip().endswith(THINK)


def _system(*, has_system: bool) -> Sequence[Message]:
    return [SYSTEM] if has_system else []


def _question(number: int) -> Message:
    return {"role": "user", "content": f"Question {number}: what is {number} plus {number}?"}


def _answer(number: int, *, has_reasoning: bool) -> Message:
    return {
        "role": "assistant",
        "content": f"{_reasoning(number, has_reasoning=has_reasoning)}Answer {number} is {2 * number}.",
    }


def _call(number: int, *, has_reasoning: bool) -> Message:
    function: Json = {"name": TOOL_NAME, "arguments": {"a": number, "b": number}}
    return {
        "role": "assistant",
        "content": _reasoning(10 + number, has_reasoning=has_reasoning),
        # Some templates insist on nine letters and digits.
        "tool_calls": [{"id": f"call0000{number}", "type": "function", "function": function}],
    }


def _result(number: int) -> Message:
    content = f"Result {number} is {2 * number}"
    return {"role": "tool", "name": TOOL_NAME, "tool_call_id": f"call0000{number}", "content": content}


def _reasoning(number: int, *, has_reasoning: bool) -> str:
    return f"{THINK}\nThought {number}: the sum is easy.\n{END_OF_THINK}\n\n" if has_reasoning else ""
