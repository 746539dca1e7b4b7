"""Soft actor-critic: learning from transitions that are kept."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from leaderless.base.section import Section


class SacConfig(Section):
    """Settings of SAC; with demonstrations it is RLPD."""

    batch_size: int = Field(default=256, ge=2)
    """Transitions of an update, on all ranks together; half of them demonstrations, if there are any."""
    updates_per_decision: float = Field(default=1.0, gt=0)
    """Updates of the policy for each decision that is recorded."""
    critic_updates: int = Field(default=4, ge=1)
    """Updates of the critics for one of the policy."""
    first_decisions: int = Field(default=64, ge=1)
    """Decisions that are recorded before the first update."""
    num_heads: int = Field(default=10, ge=1)
    """Number of critics."""
    subset_size: int = Field(default=2, ge=1)
    """Critics, drawn for each update, whose least value is the target of all."""
    discount: float = Field(default=0.97, gt=0, le=1)
    """Gamma, per step of the environment."""
    target_rate: float = Field(default=0.01, gt=0, le=1)
    """Share of the critics that goes into the slow ones at each update."""
    first_temperature: float = Field(default=0.01, gt=0)
    """Weight of the entropy at first; later it is tuned."""
    target_entropy: float = -0.5
    """Entropy that the temperature is tuned for, in nats per number of an action, where actions go from -1 to 1."""
    is_entropy_valued: bool = False
    """Whether entropy to come is part of the critics' values."""
    hidden_size: int = Field(default=64, ge=1)
    """Width of the critics' hidden layers."""
    num_layers: int = Field(default=2, ge=1)
    """Number of the critics' hidden layers."""

    @model_validator(mode="after")
    def _subset_is_one(self) -> Self:
        if self.subset_size > self.num_heads:
            raise ValueError(f"subset_size={self.subset_size}: must be at most num_heads={self.num_heads}")
        return self
