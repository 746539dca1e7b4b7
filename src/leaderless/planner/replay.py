"""What it takes to replay the experts that an engine chose, and to balance the loads of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from leaderless.config import Recipe, RecipeError
from leaderless.planner.backends import KEY as BACKEND
from leaderless.planner.backends import backend_of
from leaderless.planner.engines import BUILTIN_ENGINES, engine_of
from leaderless.planner.engines import KEY as ENGINE

if TYPE_CHECKING:
    from leaderless.planner.model_size import ModelSize
    from leaderless.planner.parts import RoleInstance

MOST_EXPERTS = 255
"""Experts whose numbers fit into one byte, of which one says that none was recorded."""
REPLAY, BALANCE = "algorithm.replay_experts", "algorithm.expert_balance"


def check_experts_settings(
    recipe: Recipe, instances: Sequence[RoleInstance], sizes: Mapping[str, ModelSize | None]
) -> None:
    """Refuse settings about experts that the models, engines and back ends of a plan cannot follow.

    Raises:
        RecipeError: A model has no experts, its engine does not record choices, or its back end cannot use them.
    """
    for instance in instances:
        role = instance.role
        seen, size = recipe.as_seen_by(role), sizes.get(role)
        is_replayed = seen.algorithm.replay_experts and instance.generates
        is_balanced = seen.algorithm.expert_balance > 0 and instance.is_trained and not instance.is_critic
        key = recipe.key_of(REPLAY if is_replayed else BALANCE, role)
        if not (is_replayed or is_balanced):
            continue
        if size is not None and not size.num_experts:
            raise RecipeError.at(key, f"is set, but the model of '{role}' has no experts: leave it out")
        if is_replayed and size is not None and size.num_experts > MOST_EXPERTS:
            raise RecipeError.at(
                key,
                f"is set, but the model of '{role}' has {size.num_experts} experts, and a record can tell "
                f"{MOST_EXPERTS} apart: leave it out",
            )
        engine = recipe.key_of(ENGINE, role)
        if is_replayed and not engine_of(instance.engine, engine).records_experts:
            able = " or ".join(name for name, spec in BUILTIN_ENGINES.items() if spec.records_experts)
            raise RecipeError.at(
                key,
                f"is set, but the engine '{instance.engine}' of '{role}' does not record which experts it chooses: set "
                f"{engine} to {able}, or leave it out",
            )
        backend = seen.training.backend
        if not instance.is_engine_only and not backend_of(backend, recipe.key_of(BACKEND, role)).knows_experts:
            raise RecipeError.at(
                key,
                f"is set, but the back end '{backend}' of '{role}' does not know experts: use another, or leave it out",
            )
