"""The software that trains and scores models."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from leaderless.base.named_functions import is_function_name
from leaderless.base.section import Section

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
