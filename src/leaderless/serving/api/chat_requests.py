"""What a model may be asked in a chat: the one form into which the requests of all APIs are translated.

It is that of OpenAI's chat completions, whose messages chat templates are written for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue

from leaderless.base.values import Json
from leaderless.serving.api.requests import (
    MAX_LIKELY,
    ApiRequest,
    Refused,
    StrictSection,
    in_few_words,
)
from leaderless.serving.http_server import ApiError


class ContentPart(StrictSection):
    """A part of a message; what it has besides, such as a mark for a cache, has no effect."""

    model_config = ConfigDict(extra="ignore")


class TextPart(ContentPart):
    """A text in a message."""

    type: Literal["text"]
    """Kind of the part."""
    text: str
    """Text of the part."""


class ImageUrl(ContentPart):
    """The address of an image."""

    url: str
    """The image itself, as a data URL."""


class ImagePart(ContentPart):
    """An image in a message, which the model sees as closely as its own settings say."""

    type: Literal["image_url"]
    """Kind of the part."""
    image_url: ImageUrl
    """The image."""


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


class Message(StrictSection):
    """One message of a chat."""

    role: str
    """Role of the author, as the model's chat template names it."""
    content: Annotated[
        str | list[TextPart | ImagePart], in_few_words("must be a text, or a list of parts of type text or image_url")
    ] = ""
    """Text of the message, or its parts; parts of text alone are joined by line breaks."""
    name: str | None = None
    """Name of the author, for templates that use it."""
    tool_calls: tuple[ToolCall, ...] = Field(default=(), strict=False)
    """Calls of tools in an earlier answer."""
    tool_call_id: str | None = None
    """Name of the call that a message of a tool answers."""

    def to_json(self) -> dict[str, Json]:
        """Return the message as it was given, without what is empty."""
        return self.model_dump(exclude_unset=True, exclude_none=True)

    @property
    def has_images(self) -> bool:
        """Check whether the message has images."""
        return not isinstance(self.content, str) and any(isinstance(part, ImagePart) for part in self.content)


class ToolFunction(StrictSection):
    """A function that may be called."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1)
    """Name of the function."""


class ChosenFunction(StrictSection):
    """A tool that has to be called."""

    type: Literal["function"]
    """Kind of the tool."""
    function: ToolFunction
    """The function."""


class OfferedTool(StrictSection):
    """A tool that may be called; templates are given all that it has."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    """Kind of the tool."""
    function: ToolFunction
    """The function."""


class JsonSchema(StrictSection):
    """A JSON schema with a name."""

    model_config = ConfigDict(extra="ignore")

    name: str = "output"
    """Name of the schema; it has no effect."""
    schema_: dict[str, JsonValue] = Field(default_factory=dict, alias="schema")
    """The schema; any JSON if it is empty."""


class ResponseFormat(StrictSection):
    """The format that the text of a response has to have."""

    type: Literal["text", "json_object", "json_schema"]
    """Kind of the format."""
    json_schema: JsonSchema | None = None
    """Schema of the JSON."""

    @property
    def schema_of_text(self) -> Json:
        """Return the JSON schema of the text; None for any text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.schema_
        return None if self.type == "text" else {"type": "object"}


TEMPLATE_ARGUMENTS = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "messages"}
    | {"max_length", "padding", "processor_kwargs", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
    | {"tokenize", "tokenizer_kwargs", "tools", "truncation"}
)
"""Arguments of templates that requests have in other fields, or not at all."""


class ChatQuestion(ApiRequest):
    """A request for `/v1/chat/completions`, and what requests of other APIs for a chat become."""

    refused: ClassVar[Refused] = {
        "functions": (([],), "it has been replaced by tools"),
        "function_call": (("none", "auto"), "it has been replaced by tool_choice"),
        "modalities": ((["text"],), "responses are text"),
        "audio": ((), "responses are text"),
        "prediction": ((), "nothing is predicted"),
        "web_search_options": ((), "there is no search"),
    }

    messages: list[Message] = Field(min_length=1)
    """Messages of the chat so far."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a response; as many as the model can take if not given."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Older name of `max_completion_tokens`."""
    verbatim: ClassVar[frozenset[str]] = frozenset({"tools", "response_format", "chat_template_kwargs"})

    logprobs: bool = False
    """Whether the log-probability of each sampled token is returned."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LIKELY)
    """Number of likely tokens that are returned with the log-probability of each token."""
    response_format: ResponseFormat = ResponseFormat(type="text")
    """Format that the text of a response has to have."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of the chat template, as vLLM takes them."""
    tools: tuple[dict[str, JsonValue], ...] = Field(default=(), strict=False)
    """Schemas of the tools."""
    tool_choice: Annotated[
        Literal["auto", "none", "required"] | ChosenFunction,
        in_few_words('must be auto, none, required, or {"type": "function", "function": {"name": ...}}'),
    ] = "auto"
    """Whether tools may or have to be called, or which one has to be."""
    parallel_tool_calls: bool = True
    """Whether several tools may be called at once; they may, unless a call is demanded."""

    @property
    def wants_log_probs(self) -> bool:
        """Check whether log-probabilities are returned."""
        return self.logprobs

    @property
    def num_likely(self) -> int:
        """Return the number of likely tokens for each token."""
        return self.top_logprobs

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a response; None for as many as the model can take."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered_tools(self) -> tuple[Mapping[str, Json], ...]:
        """Return the tools that are offered."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def demanded_tools(self) -> tuple[Mapping[str, Json], ...]:
        """Return the tools of which one has to be called; none if the model may also answer."""
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else ()
        name = self.tool_choice.function.name
        return tuple(tool for tool in self.tools if _name_of(tool) == name)

    def check(self) -> None:
        """Check names of one field, messages, and tools."""
        super().check()
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            reason = "max_tokens is another name of max_completion_tokens: give one of them, or the same number"
            raise ApiError(400, reason, "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, f"top_logprobs={self.top_logprobs} needs logprobs=true", "top_logprobs")
        if self.response_format.type == "json_schema" and self.response_format.json_schema is None:
            raise ApiError(400, "response_format.json_schema must be given", "response_format.json_schema")
        if taken := sorted(TEMPLATE_ARGUMENTS & set(self.chat_template_kwargs)):
            raise ApiError(400, f"chat_template_kwargs must not have '{taken[0]}'", "chat_template_kwargs")
        for place, message in enumerate(self.messages):
            if not {"content", "tool_calls"} & message.model_fields_set:
                raise ApiError(400, f"messages.{place}.content must be given", f"messages.{place}.content")
        for place, tool in enumerate(self.tools):
            try:
                OfferedTool.model_validate(tool)
            except ValueError as error:
                rule = 'must be {"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise ApiError(400, f"tools.{place}: {rule}", f"tools.{place}") from error
        if self.tool_choice not in ("auto", "none") and not self.demanded_tools:
            raise ApiError(400, "tool_choice demands a call, but no such tool is offered", "tool_choice")
        if self.demanded_tools and self.response_format.type != "text":
            raise ApiError(
                400, "tool_choice demands a call, so response_format has no use: leave it out", "tool_choice"
            )


def _name_of(tool: Mapping[str, Json]) -> Json:
    function = tool["function"]
    assert isinstance(function, Mapping)
    return function["name"]
