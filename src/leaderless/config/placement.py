"""Automatic placement: what the planner may choose."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, JsonValue, model_validator

from leaderless.base.section import Section

AUTO = "auto"


def or_auto(schema: dict[str, JsonValue]) -> None:
    """Let a JSON Schema accept `auto` in place of a mapping."""
    mapping: dict[str, JsonValue] = {key: schema.pop(key) for key in ("type", "additionalProperties")}
    schema["anyOf"] = [mapping, {"const": AUTO, "type": "string"}]


class PlacementConfig(Section):
    """The planner chooses the ranks of each node, and how far generation may be ahead, by measured seconds."""

    profile: str = Field(default="profile.json", min_length=1)
    """File with measured seconds, which `leaderless profile` writes."""
    max_lag: int = Field(default=0, ge=0)
    """Most iterations that generation may be ahead of training, as `channels.*.capacity`; with 0 every response is
    sampled with the newest weights. A channel of the recipe's own is kept instead."""
    max_windows: int = Field(default=1, ge=1)
    """Most parts of a step that pass through pools one behind the other, as `batch.windows_per_step`: powers of two up
    to it are compared. A number that the recipe sets above 1 is kept instead."""
    continuous: bool = False
    """Let ranks that generate also work on several iterations at once, as with `channels.*.mode: continuous`. Which
    weights sample which token depends on time then."""
    max_staleness: int | None = Field(default=None, ge=1)
    """With `continuous`, most optimizer steps between the weights that sampled a token and those that are trained with
    it; capacities of powers of two up to what it allows are compared. By default what `max_lag` allows."""

    helpers: int = Field(default=0, ge=0)
    """With `continuous`, number of workers that have no device of their own, the last ones: they generate on devices of
    ranks that train, as `channels.*.helpers`, and have fewer prompts."""

    @model_validator(mode="after")
    def _check_continuous(self) -> PlacementConfig:
        if self.continuous and not (self.max_lag or self.max_staleness):
            raise ValueError(
                "continuous=true needs room to be ahead: set max_staleness to at least batch.updates_per_step, or "
                "max_lag to at least 1"
            )
        for key in ("max_staleness", "helpers"):
            if getattr(self, key) and not self.continuous:
                raise ValueError(
                    f"{key}={getattr(self, key)} is for continuous generation, which is not allowed here: set "
                    "continuous: true, or leave it out"
                )
        return self

    def max_ahead(self, updates_per_step: int) -> int:
        """Most iterations that continuous generation may be ahead; 0 if there must be none.

        Args:
            updates_per_step: Optimizer steps of an iteration.
        """
        if not self.continuous or self.max_staleness is None:
            return self.max_lag if self.continuous else 0
        return self.max_staleness // updates_per_step


def expand_auto(settings: Mapping[str, object]) -> Mapping[str, object]:
    """The settings of a recipe in which `layout: auto` has become a section `placement`.

    Raises:
        ValueError: The recipe chooses layouts itself, and lets the planner choose them.
    """
    if settings.get("layout") == AUTO:
        return {**settings, "layout": {}, "placement": settings.get("placement") or {}}
    if settings.get("placement") is not None and settings.get("layout"):
        raise ValueError(
            "placement lets the planner choose all layouts, but `layout` names some: leave out one of the two"
        )
    return settings
