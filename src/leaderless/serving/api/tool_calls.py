"""Chats with tools in the format of OpenAI's API: requests and replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ConfigDict, Field, JsonValue

from leaderless.base.section import Section
from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.serving.api.requests import ChatQuestion, Message
from leaderless.serving.api.responses import ChatComposer, ChoicePart, Reply


class FunctionText(Section):
    """A function that was called."""

    model_config = ConfigDict(strict=True)

    name: str
    """Name of the function."""
    arguments: str = "{}"
    """Arguments, an object as JSON text."""


class ToolCall(Section):
    """A call of a tool in an earlier answer."""

    model_config = ConfigDict(strict=True)

    id: str | None = None
    """Name of the call."""
    index: int | None = None
    """Place of the call, which streams add; it has no effect."""
    type: Literal["function"] = "function"
    """Kind of the tool."""
    function: FunctionText
    """Function that was called, with its arguments."""


class ToolMessage(Message):
    """A message of a chat with tools."""

    content: str | list[dict[str, JsonValue]] = ""  # type: ignore[assignment]
    """Text of the message, or its parts."""
    tool_calls: tuple[ToolCall, ...] = Field(default=(), strict=False)
    """Calls of tools."""
    tool_call_id: str | None = None
    """Name of the call that a message of a tool answers."""

    def to_json(self) -> dict[str, Json]:
        """Return the message as it was given, without what is empty."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class ToolQuestion(ChatQuestion):
    """A request for a chat with tools."""

    messages: list[ToolMessage]  # type: ignore[assignment]
    """Messages of the chat so far."""
    tools: tuple[dict[str, JsonValue], ...] = Field(default=(), strict=False)
    """Schemas of the tools."""
    tool_choice: Literal["auto", "none"] = "auto"
    """Whether tools may be called."""
    parallel_tool_calls: bool = True
    """Whether several tools may be called at once; they may."""


class ToolComposer(ChatComposer):
    """Composes replies whose answers may call tools.

    Attributes:
        calls: Calls of tools by the index of the choice.
    """

    def __init__(self, question: ChatQuestion, prompts: Sequence[list[int]], tokenizer: Tokenizer) -> None:
        super().__init__(question, prompts, tokenizer)
        self.calls: dict[int, Sequence[Mapping[str, Json]]] = {}

    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:
        content = super()._content(part, is_chunk=is_chunk)
        calls = self.calls.get(part.index)
        if not calls:
            return content
        if is_chunk:
            numbered: list[Json] = [{"index": place, **call} for place, call in enumerate(calls)]
            content["delta"] = {"content": part.text or None, "tool_calls": numbered}
        else:
            content["message"] = {"role": "assistant", "content": part.text or None, "tool_calls": list(calls)}
        return content
