"""What a response is worth."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from leaderless.config.base import Section, ShorthandSection
from leaderless.config.errors import nearest


class RewardOptions(ShorthandSection):
    """What every reward has; a bare number is its weight."""

    shorthand: ClassVar[str] = "weight"
    shorthand_types: ClassVar[tuple[type, ...]] = (int, float)

    weight: float = 1.0
    """The sample's reward is the weighted sum over the rewards that apply to it."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds one response may take to grade; its process is then ended and the sample counted as failed."""
    sources: tuple[str, ...] = ()
    """Apply to rows of these sources only (`data.train.source` names the column; without one, rows of a mixture have
    the name of their dataset); empty applies to all."""


class MathOptions(RewardOptions):
    """1 where the response's final answer equals the expected one mathematically, else 0."""


class ExactMatchOptions(RewardOptions):
    """1 where the response equals the expected answer, else 0; white space at both ends does not count."""

    ignore_case: bool = False
    """Compare without regard to case."""


class FormatOptions(RewardOptions):
    """1 where the whole response matches a pattern, else 0."""

    pattern: str
    """Regular expression; `.` matches line breaks too."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        try:
            re.compile(value, re.DOTALL)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value


class RewardsConfig(Section):
    """The rewards of a recipe by name; a function of one's own by `package.module:function`."""

    model_config = Section.model_config | {"extra": "allow"}
    __pydantic_extra__: dict[str, RewardOptions]

    math: MathOptions | None = None
    """1 where the response's final answer equals the expected one mathematically, else 0."""
    exact_match: ExactMatchOptions | None = None
    """1 where the response equals the expected answer, else 0."""
    format: FormatOptions | None = None
    """1 where the whole response matches `pattern`, else 0."""

    @model_validator(mode="after")
    def _names_are_known(self) -> RewardsConfig:
        for name in self.__pydantic_extra__ or {}:
            if not re.fullmatch(r"[\w.]+:\w+", name):
                hint = nearest(name, type(self).model_fields)
                raise ValueError(
                    f"reward.{name} is no built-in reward{hint}; one of your own is 'package.module:function'"
                )
        return self

    def options(self) -> Mapping[str, RewardOptions]:
        """The rewards in use, by name, in a stable order."""
        builtin = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: options
            for name, options in (builtin | (self.__pydantic_extra__ or {})).items()
            if options is not None
        }
