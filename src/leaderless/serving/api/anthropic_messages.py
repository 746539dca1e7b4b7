"""Anthropic's messages: requests as questions of a chat, and replies to them, whole or as events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config.rollout import SamplingConfig
from leaderless.serving.api.chat_requests import ChatQuestion, ContentPart, TextPart
from leaderless.serving.api.requests import Refused, RequestBody, StrictSection, in_few_words, validated
from leaderless.serving.api.responses import ChoicePart, Composer, Reply
from leaderless.serving.http_server import ApiError, event

IGNORED = frozenset({"thinking", "redacted_thinking"})
"""Blocks of earlier answers that are not shown to the model again, as in Anthropic's API."""


class ConversationTurn(StrictSection):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    """Author of the message."""
    content: Annotated[str | list[dict[str, JsonValue]], in_few_words("must be a text or a list of blocks")]
    """Text of the message, or its blocks."""


class CustomTool(ContentPart):
    """A tool that the client runs; what it has besides has no effect."""

    type: Literal["custom"] = "custom"
    """Kind of the tool."""
    name: str = Field(min_length=1)
    """Name of the tool."""
    description: str | None = None
    """Description of the tool."""
    input_schema: dict[str, JsonValue]
    """JSON schema of its input."""


class ToolChoice(ContentPart):
    """Which tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    """`auto` leaves it to the model, `any` demands a call, `tool` a call of one tool, `none` forbids calls."""
    name: str | None = None
    """Name of the tool that has to be called."""
    disable_parallel_tool_use: bool = False
    """Whether an answer of which a call is demanded has a single one."""


class JsonFormat(StrictSection):
    """A format that answers must have."""

    type: Literal["json_schema"]
    """Kind of the format."""
    schema_: dict[str, JsonValue] = Field(alias="schema")
    """JSON schema of answers."""


class OutputConfig(ContentPart):
    """How answers are written; the effort has no effect."""

    format: JsonFormat | None = None
    """Format of answers; text if not given."""


class CountBody(RequestBody):
    """A request for `/v1/messages/count_tokens`."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        {"betas", "cache_control", "container", "context_management", "diagnostics", "inference_geo", "metadata"}
        | {"service_tier", "speed", "thinking", "user_profile_id", "workspace_id"}
    )
    refused: ClassVar[Refused] = {"mcp_servers": (([],), "the server reaches no other")}
    verbatim: ClassVar[frozenset[str]] = frozenset({"messages", "tools", "output_config"})

    model: str
    """Name of the model."""
    messages: list[ConversationTurn] = Field(min_length=1)
    """The conversation so far."""
    system: Annotated[str | list[TextPart], in_few_words("must be a text or a list of blocks of type text")] = ""
    """Text of the system, or its blocks."""
    tools: tuple[CustomTool, ...] = Field(default=(), strict=False)
    """Tools that may be called."""
    tool_choice: ToolChoice = ToolChoice(type="auto")
    """Which of them may be called."""
    output_config: OutputConfig = OutputConfig()
    """How answers are written."""

    def question(self, **fields: Json) -> ChatQuestion:
        """Translate the request into a question of a chat."""
        names: dict[str, str] = {}
        system = self.system if isinstance(self.system, str) else "\n".join(part.text for part in self.system)
        messages: list[Json] = [{"role": "system", "content": system}] if system else []
        for place, turn in enumerate(self.messages):
            messages += _translated(turn, f"messages.{place}.content", names)
        if self.messages[-1].role == "assistant":
            message = "messages must end with a message of another role than 'assistant': answers are not prefilled"
            raise ApiError(400, message, "messages")
        choice = {"auto": "auto", "none": "none", "any": "required"}.get(self.tool_choice.type)
        named: Json = {"type": "function", "function": {"name": self.tool_choice.name}}
        fields |= {"model": self.model, "messages": messages, "tool_choice": choice or named}
        fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
        if self.output_config.format is not None:
            schema: Json = {"name": "output", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return validated(fields, ChatQuestion)


class MessagesBody(CountBody, SamplingConfig):
    """A request for `/v1/messages`."""

    max_tokens: int = Field(ge=1)
    """Most tokens of the answer."""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts before which the answer ends."""
    stream: bool = False
    """Whether the answer is sent while it is sampled."""
    seed: int | None = None
    """Seed of the sampling noise, beyond Anthropic's API; random if not given."""
    return_token_ids: bool = False
    """Whether the token ids of prompt and answer are returned, beyond Anthropic's API."""

    @override
    def question(self, **fields: Json) -> ChatQuestion:
        sampling = self.model_dump(include={*SamplingConfig.model_fields} & self.model_fields_set)
        own = self.model_dump(include={"max_tokens", "seed", "stream", "return_token_ids"})
        return super().question(**sampling, **own, stop=[*self.stop_sequences])


def _function(tool: CustomTool) -> Json:
    """A tool as chat templates know it."""
    described: dict[str, Json] = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _translated(turn: ConversationTurn, field: str, names: dict[str, str]) -> list[Json]:
    """The messages of a chat that a message consists of; `names` are those of the tools by the ids of calls."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_answered(turn.content, field, names)]
    messages: list[Json] = []
    parts: list[Json] = []

    def close() -> None:
        if parts:
            messages.append({"role": turn.role, "content": [*parts]})
            parts.clear()

    for place, block in enumerate(turn.content):
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{field}.{place}"))
            continue
        close()
        identity, given = str(block.get("tool_use_id") or ""), block.get("content")
        content = given if isinstance(given, str) else _parts(given or [], f"{field}.{place}.content")
        named: dict[str, Json] = {"name": names[identity]} if identity in names else {}
        messages.append({"role": "tool", "tool_call_id": identity, **named, "content": content})
    close()
    return messages or [{"role": turn.role, "content": ""}]


def _answered(blocks: Sequence[Mapping[str, Json]], field: str, names: dict[str, str]) -> Json:
    """An earlier answer of the model."""
    texts: list[str] = []
    calls: list[Json] = []
    for place, block in enumerate(blocks):
        kind, name, value = block.get("type"), block.get("name"), block.get("input") or {}
        if kind == "text":
            texts.append(str(block.get("text", "")))
        elif kind == "tool_use" and isinstance(name, str) and isinstance(value, Mapping):
            identity = str(block.get("id") or "")
            names[identity] = name
            function: Json = {"name": name, "arguments": json.dumps(value, ensure_ascii=False)}
            calls.append({"id": identity, "type": "function", "function": function})
        elif kind not in IGNORED:
            raise _unknown(block, f"{field}.{place}", "text, tool_use with name and input, or thinking")
    message: dict[str, Json] = {"role": "assistant", "content": "\n".join(texts)}
    return message | ({"tool_calls": calls} if calls else {})


def _parts(blocks: Json, field: str) -> Json:
    if not isinstance(blocks, list):
        raise ApiError(400, f"{field} must be a text or a list of blocks", field)
    return [_part(block, f"{field}.{place}") for place, block in enumerate(blocks)]


def _part(block: Json, field: str) -> Json:
    """A text or an image of a user or of a tool."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(block, Mapping) or kind not in {"text", "image"}:
        raise _unknown(block, field, "text, image or tool_result")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    source = block.get("source")
    if isinstance(source, Mapping) and source.get("type") == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    if isinstance(source, Mapping) and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": str(source.get("url"))}}
    raise _unknown(source, f"{field}.source", "base64")


def _unknown(block: Json, field: str, known: str) -> ApiError:
    kind = block.get("type") if isinstance(block, Mapping) else block
    return ApiError(400, f"{field} is of the type {kind!r:.40}, which is not read: it must be {known}", field)


_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesComposer(Composer[ChatQuestion]):
    """Composes replies of `/v1/messages`."""

    prefix = "msg_"

    @override
    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        (choice,) = self.choices(parts)
        blocks: list[Json] = [self._text(choice.shown_text)] if choice.shown_text else []
        blocks += [_tool_use(call) for call in choice.calls]
        tokens: Reply = {"token_ids": choice.tokens} if self.question.return_token_ids else {}
        return self._message(blocks, choice) | tokens

    @override
    async def events(self, parts: AsyncIterator[ChoicePart]) -> AsyncIterator[bytes]:
        yield _event("message_start", message=self._message([], None))
        last, is_open = ChoicePart(0), False
        tokens: list[Json] = []
        try:
            async for part in self.shown(parts):
                last = part
                tokens += part.tokens
                if part.text and not is_open:
                    is_open = True
                    yield _event("content_block_start", index=0, content_block=self._text(""))
                    yield _event("ping")
                if part.text:
                    yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": part.text})
        except ApiError as error:
            yield event(error.to_anthropic_json(), "error")
            return
        if is_open:
            yield _event("content_block_stop", index=0)
        for index, call in enumerate(last.calls, int(is_open)):
            block = _tool_use(call)
            delta: Json = {"type": "input_json_delta", "partial_json": _arguments(call)}
            yield _event("content_block_start", index=index, content_block={**block, "input": {}})
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        extra: Reply = {"token_ids": tokens} if self.question.return_token_ids else {}
        yield _event("message_delta", delta=_end(last, has_room=self._has_room), usage=self._usage(), **extra)
        yield _event("message_stop")

    def _text(self, text: str) -> Json:
        return {"type": "text", "text": text, "citations": None}

    def _message(self, blocks: list[Json], end: ChoicePart | None) -> Reply:
        """A message, which has no end yet at the beginning of a stream."""
        head: Reply = {"id": self.id, "type": "message", "role": "assistant", "model": self.question.model}
        ended = {"stop_reason": None, "stop_sequence": None} if end is None else _end(end, has_room=self._has_room)
        tokens: Reply = {"prompt_token_ids": self.prompts[0]} if self.question.return_token_ids else {}
        return head | {"content": blocks} | ended | {"usage": self._usage()} | tokens

    @property
    def _has_room(self) -> bool:
        """Whether an answer that was cut has as many tokens as were asked for."""
        return self._num_tokens >= (self.question.longest or 0)

    def _usage(self) -> Reply:
        cached: Reply = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": len(self.prompts[0]), "output_tokens": self._num_tokens, **cached}


def _end(part: ChoicePart, *, has_room: bool) -> Reply:
    reason = _STOP_REASONS.get(part.finish_reason or "", "stop_sequence" if part.stopped_by else "end_turn")
    reason = reason if has_room or reason != "max_tokens" else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": part.stopped_by if reason == "stop_sequence" else None}


def _arguments(call: Mapping[str, Json]) -> str:
    function = call["function"]
    assert isinstance(function, Mapping)
    return str(function["arguments"])


def _tool_use(call: Mapping[str, Json]) -> Reply:
    """A call of a tool, given in the format of OpenAI's API."""
    function = call["function"]
    assert isinstance(function, Mapping)
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(_arguments(call))}


def _event(kind: str, **fields: Json) -> bytes:
    return event({"type": kind, **fields}, kind)
