"""What a recipe keeps outside of the memory in which it computes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.config import Recipe
from leaderless.config.models import Offload
from leaderless.planner.engines import backend_of
from leaderless.planner.graph.adapters import base_of
from leaderless.planner.plan_parts import RoleInstance, answering


def is_only_scored(recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> bool:
    """Whether the weights of an instance are its own, never change, and only score, so that they may be elsewhere."""
    if instance.is_trained or instance.has_engine or instance == answering(instances, recipe.evaluation.role):
        return False
    if any(one.is_trained and one.role == instance.role for one in instances):
        return False  # it gets new weights
    if not backend_of(recipe.as_seen_by(instance.role).training.backend).moves_frozen:
        return False
    return base_of(recipe, instances, instance) is None


def where_frozen(recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> Offload:
    """Where the weights of an instance are while it does not score."""
    is_own = is_only_scored(recipe, instances, instance)
    return recipe.as_seen_by(instance.role).training.offload_frozen if is_own else "none"
