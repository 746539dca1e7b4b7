"""Requests of the Tinker API that come as JSON, with the names of the package `tinker`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from leaderless.serving.http_server import ApiError, parse_body

VERSION = (0, 38)
"""Version of `tinker` whose protocol this server has."""
TESTED = ".".join(map(str, VERSION))

AnyTinkerRequest = TypeVar("AnyTinkerRequest", bound="TinkerRequest")


class TinkerRequest(BaseModel):
    """A request; unknown fields are refused, since they would change what is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    type: str = ""


class ClientQuestion(TinkerRequest):
    """A client that asks for its settings."""

    sdk_version: str = ""


class NewSession(TinkerRequest):
    """A client that begins."""

    tags: Sequence[str] = ()
    user_metadata: dict[str, object] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionName(TinkerRequest):
    """A client that is still there."""

    session_id: str


class ModelName(TinkerRequest):
    """A question about adapters."""

    model_id: str


class WantedAdapters(BaseModel):
    """Adapters of a client: which layers have some, and of which rank."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1, le=1024)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class WantedOptimizer(BaseModel):
    """Optimizer of adapters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["adamw"] = "adamw"


class NewModel(TinkerRequest):
    """A request for new adapters."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, object] | None = None
    lora_config: WantedAdapters
    optimizer_config: WantedOptimizer = WantedOptimizer()


class AdamParams(BaseModel):
    """Settings of one step of AdamW."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float = Field(default=0.0001, ge=0, allow_inf_nan=False)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    grad_clip_norm: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class StepRequest(TinkerRequest):
    """A request for a step of the optimizer."""

    model_id: str
    seq_id: int = Field(ge=1)
    adam_params: AdamParams = Field(validation_alias=AliasChoices("adam_params", "optim_params", "optimizer_params"))


class SaveRequest(TinkerRequest):
    """A request to save adapters and optimizer."""

    model_id: str
    path: str | None = None
    seq_id: int = Field(ge=1)
    ttl_seconds: int | None = Field(default=None, ge=3600)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SamplerRequest(TinkerRequest):
    """A request to save adapters to sample with, under a name or for one sampler."""

    model_id: str
    path: str | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    seq_id: int = Field(ge=1)
    ttl_seconds: int | None = Field(default=None, ge=3600)
    user_metadata: dict[str, str] | None = None


class LoadRequest(TinkerRequest):
    """A request to load a saved state into adapters, or into new ones."""

    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, object] | None = None
    path: str
    optimizer: bool
    optimizer_config: WantedOptimizer | None = None
    weights_access_token: str | None = None


class NewSampler(TinkerRequest):
    """A request for a sampler with the model as it is, or with a saved state."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class SamplerName(TinkerRequest):
    """A further client of a sampler."""

    sampling_session_id: str


class TextChunk(BaseModel):
    """Tokens of a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: Sequence[int]
    type: Literal["encoded_text"] = "encoded_text"


class PromptChunks(BaseModel):
    """A prompt, in parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chunks: Sequence[TextChunk]


class DrawingParams(BaseModel):
    """How tokens are drawn, and where a sample ends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleRequest(TinkerRequest):
    """A request for samples."""

    num_samples: int = Field(default=1, ge=1, le=1024)
    prompt: PromptChunks
    sampling_params: DrawingParams
    sampling_session_id: str
    seq_id: int
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None


class FutureQuestion(TinkerRequest):
    """A question for the result of a request."""

    request_id: str
    allow_metadata_only: bool = False


class PathQuestion(TinkerRequest):
    """A question about a saved state."""

    tinker_path: str


def read_request(body: bytes, kind: type[AnyTinkerRequest]) -> AnyTinkerRequest:
    """Read and check a request.

    Raises:
        ApiError: The body is no JSON object, or a field is unknown, wrong or not supported.
    """
    given = parse_body(body)
    if not isinstance(given, dict):
        raise ApiError(400, "the body of the request must be a JSON object")
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = error.errors()[0]
        key = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            message = f"{key} is not known to this server, which has the protocol of tinker {TESTED}: leave it out"
        elif found["type"] == "missing":
            message = f"{key} is missing"
        else:
            message = f"{key}={found['input']!r}: {found['msg'][0].lower()}{found['msg'][1:]}"
        raise ApiError(400, message, key) from error


def place_of(body: bytes) -> tuple[str, int] | None:
    """The adapters and the number that a request names, however wrong the rest of it is; None if it does not."""
    try:
        given = parse_body(body)
    except ApiError:
        return None
    if not isinstance(given, dict):
        return None
    model_id, seq_id = given.get("model_id"), given.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and isinstance(seq_id, int) else None


def check_version(version: str) -> str:
    """A warning for a client with a version of `tinker`; empty if there is nothing to say.

    Raises:
        ApiError: The protocol of the client is too old.
    """
    try:
        major, minor, *_ = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return f"this server was tested with tinker {TESTED}, and does not know version '{version}'"
    if (major, minor) < VERSION:
        raise ApiError(
            400,
            f"tinker {version} has an older protocol than this server, that of {TESTED}: "
            f"pip install 'tinker>={TESTED}'",
            "sdk_version",
        )
    return "" if (major, minor) == VERSION else f"this server was tested with tinker {TESTED}, and not with {version}"
