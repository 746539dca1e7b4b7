"""Requests in the formats of several APIs, and what completions may ask. No refused field is ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
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

AnyBody = TypeVar("AnyBody", bound="RequestBody")
Refused = Mapping[str, tuple[tuple[Json, ...], str]]
"""Unsupported fields of an API: values without effect, and why no other value is accepted."""

MAX_LIKELY = 20
"""Most likely tokens for each token, as in OpenAI's API."""
OPENAI_HARMLESS = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
    | {"service_tier", "store", "user", "verbosity"}
)
"""Fields of OpenAI's API that ask for nothing that a client could miss."""


def in_few_words(rule: str) -> WrapValidator:
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
    in_few_words("must be a text or a list of texts, none of them empty"),
]
Prompts = Annotated[
    str | list[str] | TokenIds | list[TokenIds],
    in_few_words("must be a text, a list of texts, token ids, or a list of lists of token ids"),
]


class StrictSection(Section):
    """A part of a request, whose values are not converted."""

    model_config = ConfigDict(strict=True)


class RequestBody(StrictSection):
    """The body of a request.

    Attributes:
        harmless: Fields that are accepted with any value, and have no effect.
        refused: Fields that are accepted with some values only, which have no effect.
        verbatim: Fields in which null is a value, as in JSON schemas; elsewhere it means that a field is left out.
    """

    harmless: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Refused] = {}
    verbatim: ClassVar[frozenset[str]] = frozenset({"tools"})

    def check(self) -> None:
        """Check what several fields say together.

        Raises:
            ApiError: They contradict each other.
        """


class StreamOptions(StrictSection):
    """How a response is streamed."""

    include_usage: bool = False
    """Whether a last chunk has the token counts."""
    include_obfuscation: bool = False
    """Whether chunks are padded, so that nobody on the network sees their lengths; it has no effect."""


class ApiRequest(RequestBody, SamplingConfig):
    """Fields that requests for completions and chats share."""

    harmless: ClassVar[frozenset[str]] = OPENAI_HARMLESS

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
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Number that is subtracted from the logit of a token for each time that the response has it."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Number that is subtracted from the logits of tokens that the response has."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    """Number that is added to the logit of each of some tokens, which are given by their ids."""

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Return the bias of each token that has one."""
        return tuple((int(token), bias) for token, bias in self.logit_bias.items())

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

    def check(self) -> None:
        """Check that options of streaming are those of a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "stream_options")
        if wrong := next((token for token in self.logit_bias if not token.isdecimal()), None):
            raise ApiError(400, f"logit_bias has '{wrong:.40}', which is no token id", "logit_bias")


class CompletionQuestion(ApiRequest):
    """A request for `/v1/completions`."""

    refused: ClassVar[Refused] = {
        "best_of": ((1,), "ask for n responses and choose"),
        "suffix": (("",), "models complete at the end only"),
    }

    prompt: Prompts
    """One prompt or several, as text or token ids."""
    max_tokens: int = Field(default=COMPLETION_TOKENS, ge=0)
    """Most tokens of a response; 0 to get the prompt alone, with `echo`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LIKELY)] | None = None
    """Number of likely tokens that are returned with the log-probability of each token; none if not given."""
    echo: bool = False
    """Whether the prompt is returned before the response, with its log-probabilities if any are."""

    @property
    def wants_log_probs(self) -> bool:
        """Check whether log-probabilities are returned."""
        return self.logprobs is not None

    @property
    def num_likely(self) -> int:
        """Return the number of likely tokens for each token."""
        return self.logprobs or 0

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a response."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or token ids."""
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)

    def check(self) -> None:
        """Check that there is a prompt."""
        super().check()
        if not self.prompts:
            raise ApiError(400, "prompt is an empty list: give at least one prompt", "prompt")
        if not self.max_tokens and not self.echo:
            raise ApiError(400, "max_tokens=0 gives nothing without echo=true: ask for at least 1", "max_tokens")


def read_question(body: bytes, kind: type[AnyBody]) -> AnyBody:
    """Read and check a request.

    Raises:
        ApiError: The body is not a JSON object, or a field is unknown, wrong or not supported.
    """
    given = parse_body(body)
    if not isinstance(given, dict):
        raise ApiError(400, "the body of the request must be a JSON object")
    fields = {name: value if name in kind.verbatim else _without_null(value) for name, value in given.items()}
    fields = {name: value for name, value in fields.items() if value is not None and name not in kind.harmless}
    for name in [name for name in fields if name in kind.refused and name not in kind.model_fields]:
        neutral, reason = kind.refused[name]
        value = fields.pop(name)
        if value not in neutral:
            raise ApiError(400, f"{_shown(name, value)} is not supported: {reason}; leave it out", name)
    return validated(fields, kind)


def validated(fields: Mapping[str, Json], kind: type[AnyBody]) -> AnyBody:
    """Make a request of its fields.

    Raises:
        ApiError: A field is unknown or wrong.
    """
    try:
        question = kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error.errors()[0], kind) from error
    question.check()
    return question


def _without_null(value: Json) -> Json:
    """Remove fields that are null, which many clients send instead of leaving them out."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [_without_null(inner) for inner in value] if isinstance(value, list) else value


def _refusal(details: ErrorDetails, kind: type[RequestBody]) -> ApiError:
    """Explain one pydantic error to the client."""
    place = [part for part in details["loc"] if isinstance(part, int) or part.isidentifier()]
    param, value = ".".join(map(str, place)), details["input"]
    if details["type"] == "extra_forbidden":
        known: Sequence[str] = [*kind.model_fields, *kind.refused] if len(place) == 1 else []
        return ApiError(400, f"unknown field {param}{nearest(param, known) if known else ''}", param)
    if details["type"] == "missing":
        return ApiError(400, f"{param} must be given", param)
    rule = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return ApiError(400, f"{_shown(param, value)}: {rule}", param)


def _shown(name: str, value: Json) -> str:
    """Show a field with its value, if that is short."""
    text = json.dumps(value, ensure_ascii=False)
    return f"{name}={text}" if len(text) <= SHOWN_CHARACTERS else name
