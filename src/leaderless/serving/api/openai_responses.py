"""OpenAI's responses: requests as questions of a chat, and replies to them, whole or as events."""

from __future__ import annotations

import itertools
import json
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config.rollout import SamplingConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.serving.api.chat_requests import ChatQuestion, ContentPart
from leaderless.serving.api.requests import OPENAI_HARMLESS, Refused, RequestBody, in_few_words, validated
from leaderless.serving.api.responses import ChoicePart, Composer, Reply, token_log_probs
from leaderless.serving.api.text_stream import CallReader
from leaderless.serving.http_server import ApiError, event

LOG_PROBS = "message.output_text.logprobs"
"""Value of `include` with which log-probabilities are returned."""


class ResponseMemory:
    """Conversations that later requests may continue by the name of their last response, up to a bound."""

    def __init__(self, most: int = 1024, most_characters: int = 1 << 26) -> None:
        """Keep at most some conversations with some characters; the oldest are forgotten first."""
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[str, tuple[Sequence[Json], int]] = OrderedDict()
        self._num_characters = 0

    def keep(self, name: str, messages: Sequence[Json]) -> None:
        """Keep a conversation up to a response."""
        self._kept[name] = messages, len(json.dumps(messages))
        self._num_characters += self._kept[name][1]
        while len(self._kept) > self._most or self._num_characters > self._most_characters:
            _, (_, length) = self._kept.popitem(last=False)
            self._num_characters -= length

    def messages(self, name: str) -> Sequence[Json]:
        """The messages of a conversation, the response included.

        Raises:
            ApiError: It is not kept.
        """
        if name not in self._kept:
            message = (
                f"response '{name}' is not kept: it is unknown, was asked for with store=false, or is older than the "
                f"{self._most:,} newest; send the whole conversation as input"
            )
            raise ApiError(400, message, "previous_response_id", "previous_response_not_found")
        return self._kept[name][0]


class CallableTool(ContentPart):
    """A function that the client runs; whether its schema is strict has no effect."""

    type: Literal["function"]
    """Kind of the tool."""
    name: str = Field(min_length=1)
    """Name of the function."""
    description: str | None = None
    """Description of the function."""
    parameters: dict[str, JsonValue] | None = None
    """JSON schema of its arguments."""


class ChosenTool(ContentPart):
    """A tool that has to be called."""

    type: Literal["function"]
    """Kind of the tool."""
    name: str
    """Name of the function."""


class TextFormat(ContentPart):
    """The format of the text of answers."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Kind of the format."""
    name: str = "output"
    """Name of the format; it has no effect."""
    schema_: dict[str, JsonValue] | None = Field(default=None, alias="schema")
    """JSON schema of the text."""


class TextConfig(ContentPart):
    """How answers are written; the verbosity has no effect."""

    format: TextFormat = TextFormat()
    """Format of answers."""


class ResponsesBody(RequestBody, SamplingConfig):
    """A request for `/v1/responses`."""

    harmless: ClassVar[frozenset[str]] = (OPENAI_HARMLESS - {"metadata", "store"}) | {
        *("background_options", "image", "max_tool_calls", "reasoning", "stream_options")
    }
    refused: ClassVar[Refused] = {
        "background": ((False,), "nobody would ask for the response later"),
        "context_management": (([],), "nothing is left out of a conversation"),
        "conversation": ((), "conversations are continued by previous_response_id"),
        "moderation": ((), "nothing is moderated"),
        "prompt": ((), "no prompts are kept"),
        "truncation": (("disabled",), "nothing is left out of a conversation"),
    }
    verbatim: ClassVar[frozenset[str]] = frozenset({"tools", "text", "input"})

    model: str
    """Name of the model."""
    input: Annotated[str | list[dict[str, JsonValue]], in_few_words("must be a text or a list of items")]
    """Text of the user, or items of the conversation."""
    instructions: str | None = None
    """Text of the system, for this response alone."""
    previous_response_id: str | None = None
    """Name of the response that the conversation continues."""
    store: bool = True
    """Whether the response may be continued by its name."""
    tools: tuple[CallableTool, ...] = Field(default=(), strict=False)
    """Functions that may be called."""
    tool_choice: Literal["auto", "none", "required"] | ChosenTool = "auto"
    """Which of them may be called."""
    parallel_tool_calls: bool = True
    """Whether several functions may be called at once; they may."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a response; as many as the model can take if not given."""
    text: TextConfig = TextConfig()
    """How answers are written."""
    include: list[str] = Field(default_factory=list)
    """Additional parts of the reply, of which there are log-probabilities."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """Number of likely tokens that are returned with the log-probability of each token."""
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    """Notes of the client, which the reply repeats."""
    stream: bool = False
    """Whether the response is sent while it is sampled."""
    seed: int | None = None
    """Seed of the sampling noise, beyond OpenAI's API; random if not given."""
    return_token_ids: bool = False
    """Whether the token ids of prompt and response are returned, beyond OpenAI's API."""

    def messages(self, memory: ResponseMemory) -> list[Json]:
        """The conversation so far, without the text of the system for this response."""
        earlier = memory.messages(self.previous_response_id) if self.previous_response_id else []
        items: list[Json] = [*self.input] if isinstance(self.input, list) else [{"role": "user", "content": self.input}]
        messages = _translated(items, earlier)
        last = messages[-1] if messages else None
        if not isinstance(last, Mapping) or last.get("role") == "assistant":
            message = "input must end with an item that is no answer of the model: answers are not prefilled"
            raise ApiError(400, message, "input")
        return messages

    def question(self, messages: Sequence[Json]) -> ChatQuestion:
        """Translate the request into a question of a chat."""
        fields: dict[str, Json] = self.model_dump(include={*SamplingConfig.model_fields} & self.model_fields_set)
        fields |= self.model_dump(include={"model", "seed", "stream", "return_token_ids", "parallel_tool_calls"})
        system: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields |= {"messages": [*system, *messages], "logprobs": LOG_PROBS in self.include}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        if isinstance(self.tool_choice, str):
            fields["tool_choice"] = self.tool_choice
        else:
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
        if self.top_logprobs:
            fields["top_logprobs"] = self.top_logprobs
        form = self.text.format
        if form.type != "text":
            schema: Json = {"name": form.name, "schema": form.schema_ or {}}
            fields["response_format"] = {"type": form.type, **({"json_schema": schema} if form.schema_ else {})}
        return validated(fields, ChatQuestion)


def _function(tool: CallableTool) -> Json:
    """A tool as chat templates know it."""
    described: dict[str, Json] = {} if tool.description is None else {"description": tool.description}
    parameters: Json = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}}


def _translated(items: Sequence[Json], earlier: Sequence[Json]) -> list[Json]:
    """The messages of a chat that items are, behind earlier ones. An answer and the calls behind it are one message."""
    messages = [*earlier]
    names = dict(_names(earlier))
    for place, item in enumerate(items):
        field = f"input.{place}"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or kind not in _ITEMS:
            raise ApiError(400, f"{field} is of the type {kind!r:.40}, which is not read: use {_KNOWN}", field)
        if kind == "message":
            role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
            messages.append({"role": role, "content": _content(item.get("content"), field)})
        elif kind == "function_call":
            name, identity = item.get("name"), str(item.get("call_id") or "")
            if not isinstance(name, str):
                raise ApiError(400, f"{field}.name must be given", f"{field}.name")
            names[identity] = name
            function: Json = {"name": name, "arguments": str(item.get("arguments") or "{}")}
            call: Json = {"id": identity, "type": "function", "function": function}
            last = messages[-1] if len(messages) > len(earlier) else None
            if isinstance(last, dict) and last["role"] == "assistant":
                messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", []), call]}
            else:
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind == "function_call_output":
            identity = str(item.get("call_id") or "")
            named: dict[str, Json] = {"name": names[identity]} if identity in names else {}
            content = _content(item.get("output"), field)
            messages.append({"role": "tool", "tool_call_id": identity, **named, "content": content})
    return messages


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_KNOWN = "message, function_call or function_call_output"


def _names(messages: Sequence[Json]) -> list[tuple[str, str]]:
    """The names of tools by the ids of their calls."""
    calls = [call for one in messages if isinstance(one, dict) for call in one.get("tool_calls", [])]
    return [(call["id"], call["function"]["name"]) for call in calls]


def _content(given: Json, field: str) -> Json:
    """A text, or parts of a message in the form of chats."""
    if isinstance(given, str):
        return given
    parts: list[Json] = []
    for part in given if isinstance(given, list) else [given]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in {"input_text", "output_text", "text"}:
            parts.append({"type": "text", "text": str(part.get("text", ""))})
        elif isinstance(part, Mapping) and kind == "refusal":
            parts.append({"type": "text", "text": str(part.get("refusal", ""))})
        elif isinstance(part, Mapping) and kind == "input_image":
            parts.append({"type": "image_url", "image_url": {"url": str(part.get("image_url"))}})
        else:
            message = f"{field} has a part of the type {kind!r:.40}, which is not read: use input_text or input_image"
            raise ApiError(400, message, field)
    return parts


class ResponsesComposer(Composer[ChatQuestion]):
    """Composes replies of `/v1/responses`."""

    prefix = "resp_"

    def __init__(
        self,
        question: ChatQuestion,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,
        reader: CallReader | None = None,
        *,
        body: ResponsesBody,
        memory: ResponseMemory,
        messages: Sequence[Json],
    ) -> None:
        super().__init__(question, prompts, tokenizer, reader)
        self._body, self._memory, self._messages = body, memory, messages
        self._numbers = itertools.count()

    @override
    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        (choice,) = self.choices(parts)
        items: list[Json] = [self._message(choice)] if choice.shown_text or not choice.calls else []
        items += [_call_item(call) for call in choice.calls]
        return self._end(choice, items)

    @override
    async def events(self, parts: AsyncIterator[ChoicePart]) -> AsyncIterator[bytes]:
        begun = self._response("in_progress", [])
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)
        whole, items = ChoicePart(0), list[Json]()
        name, sent = f"msg_{uuid.uuid4().hex}", 0
        place: Reply = {"item_id": name, "output_index": 0, "content_index": 0}
        try:
            async for part in self.shown(parts):
                is_end = part.finish_reason is not None and not part.calls
                if not whole.text and (part.text or (is_end and not items)):
                    items.append({})
                    for one in self._begin_message(name, place):
                        yield one
                whole.extend(part)
                if part.text:
                    log_probs, sent = self._log_probs(whole, sent), len(whole.tokens)
                    yield self._event("output_text.delta", **place, delta=part.text, logprobs=log_probs)
        except ApiError as error:
            said: Reply = {"code": error.code or "server_error", "message": error.message, "param": error.param}
            yield event({"type": "error", **said, "sequence_number": next(self._numbers)}, "error")
            return
        if items:
            content = self._text(whole)
            items = [self._message(whole, name)]
            yield self._event("output_text.done", **place, text=content["text"], logprobs=content["logprobs"])
            yield self._event("content_part.done", **place, part=content)
            yield self._event("output_item.done", output_index=0, item=items[0])
        for call in whole.calls:
            items.append(item := _call_item(call))
            at: Reply = {"item_id": item["id"], "output_index": len(items) - 1}
            fresh = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("output_item.added", output_index=at["output_index"], item=fresh)
            yield self._event("function_call_arguments.delta", **at, delta=item["arguments"])
            yield self._event("function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
            yield self._event("output_item.done", output_index=at["output_index"], item=item)
        end = self._end(whole, items)
        yield self._event(str(end["status"]), response=end)

    def _begin_message(self, name: str, place: Reply) -> list[bytes]:
        item: Reply = {"id": name, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        content: Reply = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return [
            self._event("output_item.added", output_index=0, item=item),
            self._event("content_part.added", **place, part=content),
        ]

    def _event(self, kind: str, **fields: Json) -> bytes:
        kind = f"response.{kind}"
        return event({"type": kind, **fields, "sequence_number": next(self._numbers)}, kind)

    def _log_probs(self, part: ChoicePart, begin: int = 0) -> list[Json]:
        return token_log_probs(self._tokenizer, part, begin) if self.question.wants_log_probs else []

    def _text(self, choice: ChoicePart) -> Reply:
        fixed: Reply = {"type": "output_text", "annotations": []}
        return fixed | {"text": choice.shown_text, "logprobs": self._log_probs(choice)}

    def _message(self, choice: ChoicePart, name: str = "") -> Reply:
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        head: Reply = {"id": name or f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        return head | {"status": status, "content": [self._text(choice)]}

    def _end(self, choice: ChoicePart, items: list[Json]) -> Reply:
        """The whole reply, which may be continued from now on."""
        if self._body.store:
            answer: dict[str, Json] = {"role": "assistant", "content": choice.shown_text}
            answer |= {"tool_calls": [*choice.calls]} if choice.calls else {}
            self._memory.keep(self.id, [*self._messages, answer])
        is_cut = choice.finish_reason == "length"
        reply = self._response("incomplete" if is_cut else "completed", items)
        reply["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        num_read, num_said = len(self.prompts[0]), self._num_tokens
        reply["usage"] = {
            "input_tokens": num_read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_read + num_said,
        }
        if self.question.return_token_ids:
            reply |= {"token_ids": choice.tokens, "prompt_token_ids": self.prompts[0]}
        return reply

    def _response(self, status: str, output: list[Json]) -> Reply:
        body = self._body
        repeated: Reply = body.model_dump(
            by_alias=True,
            include={"instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls", "text"}
            | {"previous_response_id", "store", "temperature", "tool_choice", "tools", "top_logprobs", "top_p"},
        )
        head: Reply = {"id": self.id, "object": "response", "created_at": self._created, "status": status}
        fixed: Reply = {"background": False, "error": None, "incomplete_details": None, "truncation": "disabled"}
        return head | fixed | repeated | {"output": output, "usage": None}


def _call_item(call: Mapping[str, Json]) -> dict[str, Json]:
    """A call of a tool, given in the format of OpenAI's chats."""
    function = call["function"]
    assert isinstance(function, Mapping)
    named: Reply = {"name": function["name"], "arguments": function["arguments"]}
    head: Reply = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed"}
    return head | {"call_id": call["id"]} | named
