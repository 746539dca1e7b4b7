"""The choice among layouts while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator, model_validator

from leaderless.base.section import Section
from leaderless.config.layout import LayoutConfig
from leaderless.config.placement import AUTO, or_auto


class ScheduleConfig(Section):
    """The choice among layouts while a run goes on, by the seconds that its nodes have taken."""

    replan_every_steps: int = Field(default=0, ge=0)
    """Number of steps from one choice to the next; 0 keeps the recipe's `layout`."""
    layouts: Mapping[str, Mapping[str, LayoutConfig]] = Field(default={}, json_schema_extra=or_auto)
    """Further sections `layout` to choose from, by name; the recipe's own is always one of them. With `auto`, or if
    none is named, the planner searches for them."""
    min_gain: float = Field(default=0.1, ge=0, lt=1)
    """Least share of a step's seconds that another layout is expected to save."""
    horizon_steps: int = Field(default=50, ge=1)
    """Steps over which savings count, or all remaining ones if fewer are left."""
    payback: float = Field(default=2.0, gt=0)
    """Least savings over these steps, in multiples of the seconds that a switch takes."""

    @field_validator("layouts", mode="before")
    @classmethod
    def _none_is_named(cls, value: object) -> object:
        return {} if value == AUTO else value

    @model_validator(mode="after")
    def _has_a_choice(self) -> ScheduleConfig:
        if self.layouts and not self.replan_every_steps:
            raise ValueError("replan_every_steps must be at least 1, or layouts are never chosen from")
        if "layout" in self.layouts:
            raise ValueError("layouts.layout must have another name: it is that of the recipe's own layout")
        return self
