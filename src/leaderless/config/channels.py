"""Channels: what may be in flight between nodes on different ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from leaderless.base.section import Section

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
