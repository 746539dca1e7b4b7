"""Channels: what may be in flight between nodes on different ranks."""

from __future__ import annotations

from pydantic import Field

from leaderless.config.base import Section


class ChannelConfig(Section):
    """The channel into which everything goes that leaves the ranks of a node."""

    capacity: int = Field(ge=1)
    """Number of iterations in flight. The ranks of the node are that many iterations ahead of those that train: they
    generate iteration k with the weights that training iteration k - 1 - capacity has left."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Most optimizer steps between the weights that sampled a row and those that are trained with it. By default
    `capacity` times `batch.updates_per_step`, which is what the capacity makes; a smaller bound is refused."""
