"""The models of roles, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import ClassVar, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from leaderless.config.base import Section, ShorthandSection
from leaderless.config.body import PolicyConfig
from leaderless.device import find_accelerator

ComputeType = Literal["float32", "bfloat16"]


def default_compute_dtype() -> ComputeType:
    """The type in which models compute unless the recipe gives one: accelerators are slow in float32."""
    return "float32" if find_accelerator() is None else "bfloat16"


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, applied to matrices but not to one-dimensional weights such as biases and norms."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the root of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global L2 norm are scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from its peak, after the warm-up, to the last optimizer update."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises linearly from zero."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that `linear` and `cosine` end at."""


class LoraConfig(Section):
    """Adapters of low rank (LoRA, arXiv 2106.09685), which are trained in place of the weights.

    A matrix W computes as W + scale * B A, with A of shape [rank, inputs] and B of shape [outputs, rank]. The defaults
    are those of "LoRA Without Regret" (Schulman et al., 2025): all linear layers, alpha 32, and a small rank, which is
    enough for what rewards can teach. The best learning rate is about ten times that of full training.
    """

    rank: int = Field(default=16, ge=1)
    """Rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is `alpha / rank`, so that the best learning rate hardly depends on the rank."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (arXiv 2312.03732)."""
    targets: Literal["all-linear"] | Sequence[str] = "all-linear"
    """Linear layers that get adapters: those of all decoder layers, or those whose names end like one of a list. The
    part of a model that sees has adapters only where the list names its layers."""
    adapter: str | None = None
    """Folder of adapters in the format of `peft` to begin with, which says all of the above. Without one, B is 0 at
    first, and the model is exactly the one at `path`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.targets:
            raise ValueError("targets must name at least one layer: give names such as q_proj, or all-linear")
        others = self.model_fields_set - {"adapter"}
        if self.adapter is not None and others:
            raise ValueError(f"adapter says what {', '.join(sorted(others))} is: leave this out")
        return self

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


class ModelConfig(ShorthandSection):
    """One role's model; a bare string is its path."""

    shorthand: ClassVar[str] = "path"

    path: str = ""
    """A local folder in Hugging Face format, or the name of a model on the hub; a policy of a body may begin without
    one."""
    body: PolicyConfig | None = None
    """Kind of a model of a body; by default, what the folder at `path` says. Without a path, weights are random."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    compute_dtype: ComputeType = Field(default_factory=default_compute_dtype)
    """Type of activations and of the weights while they compute; master weights and optimizer are float32. The default
    is bfloat16 on a machine with an accelerator, float32 elsewhere."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute. Models of bodies then also
    divide the decisions of an episode by `batch.micro_batch_tokens`."""
    lora: LoraConfig | None = None
    """Train adapters of low rank, and leave the weights as they are; `lora: {}` for the defaults."""
    freeze_vision: bool = False
    """Leave the part that sees as it is, and train the layers for text alone; for models that see images."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Leave it off unless you have read that code."""

    @model_validator(mode="after")
    def _has_origin(self) -> Self:
        if not self.path and self.body is None:
            raise ValueError("path must be a folder, or the name of a model on the hub")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        """The JSON Schema asks for one of the two origins."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        forms = [{**schema, "required": [origin]} for origin in ("path", "body")]
        return {"title": cls.__name__, "anyOf": [*forms, {"type": "string"}]}

    @property
    def name(self) -> str:
        """What to call the model in messages."""
        return self.path or (self.body.type if self.body else "")
