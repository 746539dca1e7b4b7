"""The ranks of nodes: layouts, channels between them, and the choices that a recipe leaves to the planner."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from leaderless.base.section import Section

SHARE = r"(\d+)%-(\d+)%"
"""Pattern of a share of all ranks: from the first percentage up to, but without, the second."""


class LayoutConfig(Section):
    """The ranks of one node and how it divides them."""

    ranks: str = Field(default="all", coerce_numbers_to_str=True, json_schema_extra={"type": ["string", "integer"]})
    """`all`; ranks and inclusive ranges such as `0-3,8-11`; or a share of all ranks such as `0%-50%`."""
    dp: int | None = Field(default=None, ge=1)
    """Data-parallel size; by default the number of ranks divided by the other sizes."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel size."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel size."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel size: neighboring ranks that divide the experts of every layer, and send each other tokens for
    them. It divides the number of ranks, with `pp` the number of each stage; ranks with the same experts divide their
    weights. With 1, experts are gathered like other weights."""
    groups: Literal["auto", "whole"] = "auto"
    """`whole` keeps all responses to a prompt on one rank when rows are resharded, `auto` only if the node needs it."""

    @field_validator("ranks", mode="before")
    @classmethod
    def _ranks_are_readable(cls, value: object) -> object:
        if isinstance(value, list):
            raise ValueError('must be text: write "0-1" or "0,1"')
        if not re.fullmatch(rf"all|\d+(-\d+)?(,\d+(-\d+)?)*|{SHARE}", str(value)):
            raise ValueError(
                "must be 'all', ranks and inclusive ranges such as '0-3,8-11', or a share such as '0%-50%'"
            )
        return value

    def ranks_of(self, world_size: int) -> tuple[int, ...]:
        """The ranks in ascending order; a ValueError if they make no sense, or do not exist in a world of that size."""
        if self.ranks == "all":
            return tuple(range(world_size))
        if share := re.fullmatch(SHARE, self.ranks):
            return _ranks_of_share(int(share[1]), int(share[2]), world_size)
        ranks: list[int] = []
        for part in self.ranks.split(","):
            first, last = (int(number) for number in (part if "-" in part else f"{part}-{part}").split("-"))
            if last < first:
                raise ValueError(f"range '{part}' runs backwards")
            if last >= world_size:
                raise ValueError(
                    f"names rank {last}, but there are {world_size} (0-{world_size - 1}): "
                    f"start at least {last + 1} workers or name other ranks"
                )
            ranks.extend(range(first, last + 1))
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"'{self.ranks}' names a rank twice")
        return tuple(sorted(ranks))


def _ranks_of_share(first: int, last: int, world_size: int) -> tuple[int, ...]:
    if not first < last <= 100:
        raise ValueError(f"share '{first}%-{last}%' must begin before it ends, at 100% or before")
    for bound in (first, last):
        if bound * world_size % 100:
            raise ValueError(
                f"share '{first}%-{last}%': {bound}% of {world_size} ranks is no whole number: name ranks, or start a "
                "number of workers that it divides"
            )
    return tuple(range(first * world_size // 100, last * world_size // 100))


AUTO = "auto"


def or_auto(schema: dict[str, JsonValue]) -> None:
    """Let a JSON Schema accept `auto` in place of a mapping."""
    mapping: dict[str, JsonValue] = {key: schema.pop(key) for key in ("type", "additionalProperties")}
    schema["anyOf"] = [mapping, {"const": AUTO, "type": "string"}]


class PlacementConfig(Section):
    """The planner chooses the ranks of each node, and how far generation may be ahead, by the seconds of each stage."""

    profile: str = Field(default="profile.json", min_length=1)
    """File with measured seconds, which `leaderless profile` writes."""
    cluster: str | None = Field(default=None, min_length=1)
    """File with constants of the machines, as for `leaderless simulate`: where there is no file `profile`, layouts are
    chosen by the cost model of these machines."""
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
        """Most iterations that continuous generation may be ahead; 0 if there must be none."""
        if not self.continuous or self.max_staleness is None:
            return self.max_lag if self.continuous else 0
        return self.max_staleness // updates_per_step


def expand_auto(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Turn `layout: auto` into a section `placement`; a ValueError if the recipe has that and layouts of its own."""
    if settings.get("layout") == AUTO:
        return {**settings, "layout": {}, "placement": settings.get("placement") or {}}
    if settings.get("placement") is not None and settings.get("layout"):
        raise ValueError(
            "placement lets the planner choose all layouts, but `layout` names some: leave out one of the two"
        )
    return settings


Stragglers = Literal["wait", "defer", "cancel"]
"""Treatment of groups that are not finished when training needs rows."""


class ChannelConfig(Section):
    """The channel into which everything goes that leaves the ranks of a node."""

    capacity: int = Field(ge=0)
    """Number of iterations in flight. The ranks of the node are that many iterations ahead of those that train: they
    begin iteration k with the weights that training iteration k - 1 - capacity has left. With 0 there is no channel."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Most optimizer steps between the weights that sampled a token and those that are trained with it. By default
    `capacity` times `batch.updates_per_step`, which is what the capacity makes; a smaller bound is refused."""
    mode: Literal["fixed_lag", "continuous"] = "fixed_lag"
    """`fixed_lag`: a whole iteration is generated with the same weights, so that nothing depends on time. `continuous`:
    each rank generates groups of several iterations at once, and takes new weights between two tokens."""
    stragglers: Stragglers = "wait"
    """Treatment, in continuous mode, of groups that are not finished when training needs rows. `wait`: training
    waits for them. `defer`: groups of later iterations that are finished take their places, and they are trained in a
    later step, within `max_staleness`. `cancel`: the same, and groups that would become too old are dropped, and begun
    again after all others."""
    cache: Literal["keep", "recompute"] = "keep"
    """Treatment, in continuous mode, of the keys and values of responses in progress when new weights come."""

    portions: Sequence[Annotated[int, Field(ge=1)]] = ()
    """In continuous mode, how the ranks that generate divide the prompts of an iteration, in proportion. With
    `[2, 2, 1]` the third rank has half as many as the others; by default all have the same."""
    helpers: Mapping[int, int] = {}
    """In continuous mode, ranks that generate on the device of a rank that trains, while that one does not use it: with
    `{4: 2}`, rank 4 uses the device of rank 2."""

    @model_validator(mode="after")
    def _check_mode(self) -> ChannelConfig:
        if self.mode == "continuous":
            if not self.capacity:
                raise ValueError("mode=continuous needs room: set capacity to at least 1, or leave the mode out")
            return self
        for key in ("stragglers", "cache", "portions", "helpers"):
            # A run writes down defaults, too, and has to read them back.
            value = getattr(self, key)
            if value and value != type(self).model_fields[key].default:
                raise ValueError(
                    f"{key}={value} is for ranks that work on several iterations at once, but with "
                    "mode=fixed_lag there are none: set mode: continuous, or leave it out"
                )
        return self


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
