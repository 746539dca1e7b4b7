"""Settings that one role has for itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel

from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.base.section import Section
from leaderless.config.models import OptimizerConfig
from leaderless.config.rollout import RolloutConfig
from leaderless.config.training import TrainingConfig

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
