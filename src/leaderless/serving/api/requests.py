"""Requests in the format of OpenAI's API. Whatever is not supported is refused, never ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar, cast

from pydantic import ConfigDict, Field, JsonValue, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails

from leaderless.base.section import Section
from leaderless.base.values import Json
from leaderless.config import nearest
from leaderless.config.rollout import SamplingConfig
from leaderless.serving.http_server import ApiError, parse_body

MAX_CHOICES = 128
"""Most responses to one prompt, as in OpenAI's API."""
COMPLETION_TOKENS = 16
"""Default length of a completion, as in OpenAI's API."""
SHOWN_CHARACTERS = 80
"""Longest value that errors repeat."""

AnyQuestion = TypeVar("AnyQuestion", bound="ApiRequest")

_ONE_LOG_PROB = "the engine knows the log-probability of the sampled token only"
_UNSUPPORTED: Mapping[str, tuple[tuple[Json, ...], str]] = {
    "best_of": ((1,), "ask for n responses and choose"),
    "echo": ((False,), "a prompt has no log-probabilities here; return_token_ids gives its tokens"),
    "suffix": (("",), "models complete at the end only"),
    "frequency_penalty": ((0,), "log-probabilities would be those of another distribution"),
    "presence_penalty": ((0,), "log-probabilities would be those of another distribution"),
    "logit_bias": (({},), "log-probabilities would be those of another distribution"),
    "top_logprobs": ((0,), _ONE_LOG_PROB),
    "response_format": (({"type": "text"},), "responses are free text"),
    "tools": (([],), "put them into the messages"),
    "tool_choice": (("none", "auto"), "there are no tools"),
    "functions": (([],), "put them into the messages"),
    "parallel_tool_calls": ((True, False), "there are no tools"),
    "modalities": ((["text"],), "responses are text"),
    "service_tier": (("auto", "default"), "there is only one"),
    "store": ((False,), "nothing is kept"),
}
"""Unsupported fields of OpenAI's API: values without effect, and why no other value is accepted."""


def _in_few_words(rule: str) -> WrapValidator:
    """State the rule of a field, where pydantic would list how a value differs from each alternative."""

    def check(value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(check)


TokenIds = list[Annotated[int, Field(ge=0)]]
StopTexts = Annotated[
    Annotated[str, Field(min_length=1)] | list[Annotated[str, Field(min_length=1)]],
    _in_few_words("must be a text or a list of texts, none of them empty"),
]
Prompts = Annotated[
    str | list[str] | TokenIds | list[TokenIds],
    _in_few_words("must be a text, a list of texts, token ids, or a list of lists of token ids"),
]


class StrictSection(Section):
    """A part of a request, whose values are not converted."""

    model_config = ConfigDict(strict=True)


class StreamOptions(StrictSection):
    """How a response is streamed."""

    include_usage: bool = False
    """Whether a last chunk has the token counts."""


class ApiRequest(SamplingConfig):
    """Fields that requests for completions and chats share."""

    model_config = ConfigDict(strict=True)

    model: str
    """Name of the model."""
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Number of responses to each prompt."""
    stop: StopTexts = Field(default_factory=list)
    """Texts before which a response ends."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    """Seed of the sampling noise; random if not given."""
    stream: bool = False
    """Whether the response is sent while it is sampled."""
    stream_options: StreamOptions | None = None
    """Options of streaming."""
    return_token_ids: bool = False
    """Whether the token ids of prompt and response are returned, as vLLM does."""
    user: str | None = None
    """Name of the user, which many clients send; it has no effect, as in OpenAI's API."""

    @property
    def distribution(self) -> SamplingConfig:
        """Return how tokens are drawn."""
        return SamplingConfig(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Return the texts that end a response."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Check whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionQuestion(ApiRequest):
    """A request for `/v1/completions`."""

    prompt: Prompts
    """One prompt or several, as text or token ids."""
    max_tokens: int = Field(default=COMPLETION_TOKENS, ge=1)
    """Most tokens of a response."""
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    """Set to 0 to get the log-probability of each sampled token."""

    @property
    def wants_log_probs(self) -> bool:
        """Check whether log-probabilities are returned."""
        return self.logprobs is not None

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a response."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or token ids."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)


class TextPart(StrictSection):
    """A part of a message."""

    type: Literal["text"]
    """Kind of the part."""
    text: str
    """Text of the part."""


class ImageUrl(StrictSection):
    """The address of an image."""

    url: str
    """The image itself, as a data URL."""
    detail: Literal["auto"] = "auto"
    """How closely it is seen, which is a setting of the model here."""


class ImagePart(StrictSection):
    """An image in a message."""

    type: Literal["image_url"]
    """Kind of the part."""
    image_url: ImageUrl
    """The image."""


class Message(StrictSection):
    """One message of a chat."""

    role: str
    """Role of the author, as the model's chat template names it."""
    content: Annotated[
        str | list[TextPart | ImagePart],
        _in_few_words("must be a text, or a list of parts of type text or image_url; the detail of images is auto"),
    ]
    """Text of the message, or its parts; parts of text alone are joined by line breaks."""
    name: str | None = None
    """Name of the author, for templates that use it."""

    def to_json(self) -> dict[str, Json]:
        """Return the message as it was given, without what is empty."""
        return self.model_dump(exclude_unset=True, exclude_none=True)

    @property
    def has_images(self) -> bool:
        """Check whether the message has images."""
        return not isinstance(self.content, str) and any(isinstance(part, ImagePart) for part in self.content)


class ChatQuestion(ApiRequest):
    """A request for `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    """Messages of the chat so far."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a response; as many as the model can take if not given."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Older name of `max_completion_tokens`."""
    logprobs: bool = False
    """Whether the log-probability of each sampled token is returned."""

    @property
    def wants_log_probs(self) -> bool:
        """Check whether log-probabilities are returned."""
        return self.logprobs

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a response; None for as many as the model can take."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class FunctionText(StrictSection):
    """A function that was called."""

    name: str
    """Name of the function."""
    arguments: str = "{}"
    """Arguments, an object as JSON text."""


class ToolCall(StrictSection):
    """A call of a tool in an earlier answer."""

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


def read_question(body: bytes, kind: type[AnyQuestion]) -> AnyQuestion:
    """Read and check a request.

    Raises:
        ApiError: The body is not a JSON object, or a field is unknown, wrong or not supported.
    """
    fields = parse_body(body)
    if not isinstance(fields, dict):
        raise ApiError(400, "the body of the request must be a JSON object")
    # A JSON schema of a tool may hold null as a value.
    fields = {name: value if name == "tools" else _without_null(value) for name, value in fields.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in fields if name in _UNSUPPORTED and name not in kind.model_fields]:
        neutral, reason = _UNSUPPORTED[name]
        value = fields.pop(name)
        if value not in neutral:
            raise ApiError(400, f"{_shown(name, value)} is not supported: {reason}; leave it out", name)
    try:
        question = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error.errors()[0], kind) from error
    _check_together(question)
    return question


def _check_together(question: ApiRequest) -> None:
    if question.stream_options is not None and not question.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if isinstance(question, CompletionQuestion) and not question.prompts:
        raise ApiError(400, "prompt is an empty list: give at least one prompt", "prompt")
    if isinstance(question, ChatQuestion) and None not in {question.max_tokens, question.max_completion_tokens}:
        raise ApiError(400, "max_tokens is another name of max_completion_tokens: give one of them", "max_tokens")


def _without_null(value: Json) -> Json:
    """Remove fields that are null, which many clients send instead of leaving them out."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _refusal(details: ErrorDetails, kind: type[ApiRequest]) -> ApiError:
    """Explain one pydantic error to the client."""
    place = [part for part in details["loc"] if isinstance(part, int) or part.isidentifier()]
    param, value = ".".join(map(str, place)), details["input"]
    if details["type"] == "extra_forbidden":
        known: Sequence[str] = [*kind.model_fields, *_UNSUPPORTED] if len(place) == 1 else []
        return ApiError(400, f"unknown field {param}{nearest(param, known) if known else ''}", param)
    if details["type"] == "missing":
        return ApiError(400, f"{param} must be given", param)
    rule = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if kind is CompletionQuestion and param == "logprobs":
        rule = f"must be 0: {_ONE_LOG_PROB}"
    return ApiError(400, f"{_shown(param, value)}: {rule}", param)


def _shown(name: str, value: Json) -> str:
    """Show a field with its value, if that is short."""
    text = json.dumps(value, ensure_ascii=False)
    return f"{name}={text}" if len(text) <= SHOWN_CHARACTERS else name
