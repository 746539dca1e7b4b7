"""Instances of a plan: their engines, the weights that these are given, and who can take whose place."""

from __future__ import annotations

from pathlib import Path

from leaderless.config import Recipe
from leaderless.planner import Plan, RoleInstance, answering
from leaderless.planner.graph.adapters import companions_of
from leaderless.planner.rollout_engines import engine_for
from leaderless.rollout.external.lora_slots import Sharing, shared_by
from leaderless.training.engine import ApartSetup


def instances_of(role: str, plan: Plan, recipe: Recipe) -> dict[RoleInstance, tuple[bool, Sharing]]:
    """The instances of a role in a plan: whether each has an engine, if only for held-out prompts; who shares it."""
    every = plan.instances
    answers, own = answering(every, recipe.evaluation.role), [one for one in every if one.role == role]
    return {one: (one.has_engine or one == answers, shared_by(companions_of(recipe, every, one))) for one in own}


def is_merged(instance: RoleInstance, recipe: Recipe) -> bool:
    """Whether the engine of an instance is given weights with adapters merged in."""
    config = recipe.model_of(instance.role)
    spec = engine_for(recipe.rollout, instance.engine)
    return config is not None and config.lora is not None and not spec.takes_adapters


def trains_like(old: RoleInstance, new: RoleInstance) -> bool:
    """Whether what trains or scores one instance can do so for another one, whatever generates."""
    fields = ("role", "layout", "is_trained", "is_critic", "num_updates", "is_engine_only")
    return all(getattr(old, name) == getattr(new, name) for name in fields)


def apart_setup(recipe: Recipe, logs: Path) -> ApartSetup | None:
    """How a back end starts processes of its own."""
    config = recipe.training.megatron
    if config.python is None:
        return None
    return ApartSetup(config.python, config.start_timeout_s, config.answer_timeout_s, logs)
