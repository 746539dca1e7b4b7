"""The models of roles, how they are trained, and the settings that one role has for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.base.devices import find_accelerator
from leaderless.base.named_functions import is_function_name
from leaderless.base.section import Section, ShorthandSection
from leaderless.config.environment import PolicyConfig
from leaderless.config.rollout import RolloutConfig

ComputeType = Literal["float32", "bfloat16"]
BaseType = Literal["float32", "nf4"]
"""Type in which the weights of linear layers are kept under adapters."""
LEARNING_RATE, ADAPTER_LEARNING_RATE = 1e-6, 1e-5
"""Peak learning rates where a recipe gives none, of all weights and of adapters of low rank."""


def default_compute_dtype() -> ComputeType:
    """The type in which models compute unless the recipe gives one: accelerators are slow in float32."""
    return "float32" if find_accelerator() is None else "bfloat16"


OptimizerType = Literal["adamw", "adamw_8bit", "muon", "sgd"]
"""Name of an optimizer; each is a file in `leaderless.training.optimizers`."""
StateType = Literal["float32", "bfloat16"]
Offload = Literal["none", "host", "disk"]
"""Where something is while it is not used: where it computes, in the memory of the host, or in a file."""


class OptimizerConfig(Section):
    """An optimizer and its learning-rate schedule."""

    type: OptimizerType = "adamw"
    """Rule of an update: `adamw`; `adamw_8bit`, AdamW whose moments have 8 bits, which needs `leaderless[adamw-8bit]`;
    `muon`, which makes the update of each matrix in the layers orthogonal, and has AdamW for all other weights; or
    `sgd`, with momentum. All but `adamw` are for the back end `fsdp`."""
    state_dtype: StateType = "float32"
    """Type in which `adamw`, `muon` and `sgd` keep moments and momentum between updates. What is kept in bfloat16 is
    rounded up or down at random, the same on any number of ranks, so that it is right on average."""
    offload: Offload = "none"
    """Where what the optimizer keeps is between updates. `host`, on accelerators, is pinned memory of the host, from
    which it passes through the device in each update, a few weights at a time; `disk` is a file in
    `run.offload_folder`, of which the system keeps no more in memory than it has room for. No number changes. For the
    back end `fsdp`."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate. By default, it is 1e-6, and ten times as much for a role that trains adapters. `sgd` needs
    one: its updates are as long as gradients are, and theirs are not."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, applied to matrices but not to one-dimensional weights such as biases and norms."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment of AdamW, and of what `muon` leaves to it."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment, likewise."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the root of the second moment, likewise."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the momentum of `muon` and `sgd`, by default 0.95 and 0.9. With 0, `sgd` keeps nothing."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global L2 norm are scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from its peak, after the warm-up, to the last optimizer update."""
    warmup_updates: int = Field(default=0, ge=0)
    """Optimizer updates over which the learning rate rises linearly from zero."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that `linear` and `cosine` end at."""

    @property
    def peak(self) -> float:
        """Peak learning rate; where none is set, the rate of all weights."""
        return LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def momentum_decay(self) -> float:
        """Decay of the momentum; where none is set, the one that is usual for the optimizer."""
        return (0.95 if self.type == "muon" else 0.9) if self.momentum is None else self.momentum

    def for_adapters(self) -> Self:
        """Return these settings for a role that trains adapters."""
        return self.model_copy(update={"learning_rate": self.learning_rate or ADAPTER_LEARNING_RATE})


class LoraConfig(Section):
    """Adapters of low rank (LoRA, arXiv 2106.09685), which are trained in place of the weights.

    A matrix W computes as W + scale * B A, with A of shape [rank, inputs] and B of shape [outputs, rank]. The defaults
    are from "LoRA Without Regret" (Schulman et al., 2025): all linear layers, alpha 32, a small rank, which is
    enough for what rewards can teach, and ten times the learning rate of full training.
    """

    rank: int = Field(default=8, ge=1)
    """Rows of A."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is `alpha / rank`, so that the best learning rate hardly depends on the rank."""
    rslora: bool = False
    """Scale by `alpha / sqrt(rank)` instead (arXiv 2312.03732)."""
    targets: Literal["all-linear"] | Sequence[str] = "all-linear"
    """Linear layers that get adapters: all in the decoder layers, or the ones whose names end like one of a list. The
    part of a model that sees has adapters only where the list names its layers."""
    expert_rank: int | Literal["auto"] | None = None
    """Rank of the adapters that each expert of a mixture gets, besides those in `targets`; without it, experts stay as
    they are. `auto` is `rank` divided by the number of experts that a token goes through, and at least 1, as in "LoRA
    Without Regret". Their scale is `alpha / expert_rank`. vLLM and SGLang need `rollout.external.merge_adapters`."""
    adapter: str | None = None
    """Folder of adapters in the format of `peft` to begin with, which says all of the above. Without one, B is 0 at
    first, and the model is exactly the one at `path`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability that an input of an adapter is dropped, in updates only. It suits given texts, as for `sft` and
    preferences: a policy that is trained with dropout is not quite the one that sampled. With `adapter`, the default is
    the dropout in the folder."""
    base_dtype: BaseType = "float32"
    """Type in which the weights of linear layers for text are kept, which are not trained: `float32`, or `nf4`, the
    normal floats of 4 bits of QLoRA (arXiv 2305.14314), which needs `leaderless[nf4]`. They compute in
    `compute_dtype`. With `nf4`, the model, its native engine, and a reference that shares its weights compute with the
    same rounded weights. It is for the back end `fsdp` and models without experts; vLLM and SGLang need
    `rollout.external.merge_adapters`."""
    base_block: Literal[32, 64, 128, 256, 512, 1024] = 64
    """Weights of a row that share a scale of 32 bits, with `base_dtype: nf4`. It must divide the inputs of each layer,
    of which each rank along `tp` may have a part."""

    @field_validator("expert_rank", mode="before")
    @classmethod
    def _is_rank_or_auto(cls, value: object) -> object:
        if value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError("must be a whole number of at least 1, or auto")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.targets:
            raise ValueError("targets must name at least one layer: give names such as q_proj, or all-linear")
        if self.expert_rank is not None and self.dropout:
            raise ValueError("adapters of experts have no dropout, as in peft: leave out dropout or expert_rank")
        # A run writes down defaults, too, and has to read them back.
        if self.base_block != type(self).model_fields["base_block"].default and self.base_dtype == "float32":
            raise ValueError(f"base_block={self.base_block} is for base_dtype nf4: set that, or leave it out")
        others = self.model_fields_set - {"adapter", "dropout", "base_dtype", "base_block"}
        if self.adapter is not None and others:
            raise ValueError(f"adapter says what {', '.join(sorted(others))} is: leave this out")
        return self

    @model_serializer(mode="wrap")
    def _dump(self, dump: SerializerFunctionWrapHandler) -> dict[str, JsonValue]:
        """All settings; next to a folder, only those that were given, as the folder says the others."""
        settings: dict[str, JsonValue] = dump(self)
        if self.adapter is None:
            return settings
        return {name: value for name, value in settings.items() if name in self.model_fields_set}

    @property
    def packed_block(self) -> int:
        """Weights of a row that share a scale; 0 if all are in float32."""
        return self.base_block if self.base_dtype == "nf4" else 0

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.scale_of(self.rank)

    def scale_of(self, rank: int) -> float:
        """Factor of B A of adapters with some rank."""
        return self.alpha / (sqrt(rank) if self.rslora else rank)

    def rank_of_expert(self, num_chosen: int) -> int | None:
        """Rank of the adapters of each expert, where a token goes through `num_chosen`; None if experts have none."""
        return max(1, self.rank // num_chosen) if self.expert_rank == "auto" else self.expert_rank


class ModelConfig(ShorthandSection):
    """One role's model; a bare string is its path."""

    shorthand: ClassVar[str] = "path"

    path: str = ""
    """A local folder in Hugging Face format, a GGUF file, which is unpacked once, or the name of a model on the hub; a
    policy of a body may begin without one."""
    body: PolicyConfig | None = None
    """Kind of a model of a body; by default, what the folder at `path` says. Without a path, weights are random."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    compute_dtype: ComputeType = Field(default_factory=default_compute_dtype)
    """Type of activations and of the weights while they compute; master weights are float32. The default
    is bfloat16 on a machine with an accelerator, float32 elsewhere; plans for others, as of `simulate --cluster` and
    `plan --memory`, take theirs."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute. Models of bodies then also
    divide the decisions of an episode by `batch.micro_batch_tokens`."""
    offload_activations: bool = False
    """Keep what `gradient_checkpointing` leaves of a pass, the inputs of layers, elsewhere until the backward pass: an
    accelerator in pinned memory of the host, to which it copies them while it computes, and a CPU in a file in
    `run.offload_folder`. No number changes. For language models, with the back end `fsdp`."""
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
        if self.offload_activations and not self.gradient_checkpointing:
            raise ValueError(
                "offload_activations moves the inputs of layers, which gradient_checkpointing alone leaves: set it, "
                "too, or leave out offload_activations"
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        """The JSON Schema asks for one of the two origins."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        forms = [{**schema, "required": [origin]} for origin in ("path", "body")]
        return {"title": cls.__name__, "anyOf": [*forms, {"type": "string"}]}

    @property
    def name(self) -> str:
        """Name of the model in messages."""
        return self.path or (self.body.type if self.body else "")


Whole = Literal["nothing", "weights", "all"]
"""Part of a divided model that each rank keeps whole; see `TrainingConfig.keep_whole`."""


class MegatronConfig(Section):
    """Where Megatron-Core runs: in a process of its own next to each rank."""

    python: str | None = Field(default=None, min_length=1)
    """Python interpreter of an environment with megatron-core 0.18 and megatron-bridge 0.5; `backend: megatron` needs
    one."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a process may take until it has loaded its model."""
    answer_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without an answer after which a process counts as hanging, and the run fails."""


class TrainingConfig(Section):
    """Training and scoring of models."""

    backend: str = Field(default="fsdp")
    """Engine that holds, scores and trains the models: `fsdp` (PyTorch's fully sharded data parallelism), `megatron`
    (Megatron-Core in an environment of its own), or a custom back end as `package.module:function`."""
    keep_whole: Literal["auto"] | Whole = "auto"
    """Part of a divided model that each rank keeps whole, in addition to the layers that compute: `nothing`;
    `weights` between the forward and the backward pass, so that they are gathered once a pass and not twice; or `all`,
    that is also gradients until the last micro-batch of an update, so that ranks add them up once an update and not
    after each micro-batch. `auto` is, on accelerators, the most for which the estimated memory has room, and `nothing`
    on the CPU and where layouts may change during the run. With `all` sums have another order, so that last digits
    differ. A rank that has a model for itself and computes in half precision converts all weights once for the passes
    of an update, or, with `nothing`, layer by layer in each pass. For language models, with the back end `fsdp`."""
    offload_frozen: Offload = "none"
    """Where weights of models that are only scored, such as a reference, are while they are not: on accelerators in
    `host` memory, or on the `disk`, in a file in `run.offload_folder`. They come back whole before each node that
    scores with them. Models that also generate, and those that share the weights of another one, stay. For language
    models, with the back end `fsdp`."""
    compile: Literal["auto"] | bool = "auto"
    """Whether decoder layers are compiled (`torch.compile`), all but their attention: fewer kernels, and last digits
    that differ. `auto` does so on CUDA if a trial succeeds on all ranks. Layers with experts, those that ranks divide
    along `tp`, and adapters with dropout are not compiled, which the start of a run says. On accelerators, so is what
    scores of tokens need besides products, for all models. For language models, with the back end `fsdp`."""
    megatron: MegatronConfig = MegatronConfig()
    """Settings of the back end `megatron`."""

    @field_validator("backend")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if not value.isidentifier() and not is_function_name(value):
            raise ValueError("must be the name of a back end, such as fsdp, or package.module:function")
        return value

    @model_validator(mode="after")
    def _has_interpreter(self) -> Self:
        if self.backend == "megatron" and self.megatron.python is None:
            raise ValueError(
                "backend=megatron needs megatron.python: name the Python interpreter of an environment with "
                "megatron-core 0.18 and megatron-bridge 0.5, which need Python 3.12"
            )
        return self


DERIVED = ("reference", "critic")
"""Roles that start from another role's model if the recipe gives them none; others end in `_` and one of these."""

RoleSection = Literal["algorithm", "rollout", "optimizer", "training"]
"""A section of the recipe that a role may have for itself."""


class RoleConfig(Section):
    """Settings of one role, on top of the recipe's sections of the same names."""

    algorithm: AlgorithmConfig | None = None
    """Advantage, loss and penalties of this role, and of nodes without settings of their own that work on its samples;
    what is not given is as in `algorithm`."""
    rollout: RolloutConfig | None = None
    """Generation of this role's samples; what is not given is as in `rollout`. An engine that is `auto` is
    the same for all roles."""
    optimizer: OptimizerConfig | None = None
    """Optimizer of this role; what is not given is as in `optimizer`."""
    training: TrainingConfig | None = None
    """Settings of the engine that holds, scores and trains this role's model; by default as in `training`."""


def origin_of(role: str) -> str | None:
    """The role whose model another starts from: `policy` for `critic`, `planner` for `planner_critic`, else None."""
    first, _, kind = role.rpartition("_")
    return (first or "policy") if kind in DERIVED else None


def as_settings(section: object) -> Mapping[str, object]:
    """A section as it was given, as a mapping; empty for none."""
    if isinstance(section, BaseModel):
        return section.model_dump(exclude_unset=True)
    return section if isinstance(section, Mapping) else {}
