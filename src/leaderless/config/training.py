"""The software that trains and scores models."""

from __future__ import annotations

from pydantic import Field, field_validator

from leaderless.config.base import Section
from leaderless.config.functions import is_function_name


class TrainingConfig(Section):
    """Training and scoring of models."""

    backend: str = Field(default="fsdp")
    """What holds, scores and trains the models: `fsdp` (PyTorch's fully sharded data parallelism), or a custom back end
    as `package.module:function`."""

    @field_validator("backend")
    @classmethod
    def _is_named(cls, value: str) -> str:
        if not value.isidentifier() and not is_function_name(value):
            raise ValueError("must be the name of a back end, such as fsdp, or package.module:function")
        return value
