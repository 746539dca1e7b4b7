"""Whether models can see what they are shown, and take part in conversations, as far as files on this machine show."""

from __future__ import annotations

import json
from collections.abc import Sequence

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner.model_size import model_file
from leaderless.planner.parts import PlannedNode, RoleInstance, answering

SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "paligemma")
"""Types of the models of images and text that are supported."""
BOTH_WAYS = ("paligemma",)
"""Types of the models whose tokens of a prompt attend to all of it."""


def check_sight(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> None:
    """Refuse models that cannot take the turns of the environment, or see what it shows, and critics that see.

    Raises:
        RecipeError: The configuration of such a model is on this machine, and says so.
    """
    for role in players_of(recipe, nodes, instances):
        model = recipe.model_of(role)
        if model is not None and (family := _family(model)) is not None:
            check_player(recipe, role, family)
    for role in dict.fromkeys(instance.role for instance in instances if instance.is_critic):
        model = recipe.model_of(role)
        if model is not None and (family := _family(model)) in SEEING:
            raise RecipeError.at(
                f"models.{role}",
                f"'{model.path}' sees images (type {family}), and there is no value model that does: choose a workflow "
                "without a critic, as grpo, rloo or reinforce_pp, or a model of text with the same tokens",
            )


def players_of(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> list[str]:
    """The roles that play episodes: those of nodes that sample, and the one that answers held-out prompts."""
    roles = [role for node in nodes if node.spec.samples and (role := node.node.role) is not None]
    if instances and (recipe.evaluation.every_steps or not roles):
        roles.append(answering(instances, recipe.evaluation.role).role)
    return list(dict.fromkeys(roles))


def check_player(recipe: Recipe, role: str, family: str) -> None:
    """Refuse a model by its type; see `check_sight`.

    Args:
        recipe: The recipe.
        role: Role of the model, which plays episodes.
        family: Type of the model, as its `config.json` says.

    Raises:
        RecipeError: It cannot take turns, or reads text alone where it is shown images.
    """
    model = recipe.model_of(role)
    assert model is not None
    if family in BOTH_WAYS and (recipe.environment is not None or recipe.online is not None):
        where = "an environment" if recipe.environment is not None else "clients"
        raise RecipeError.at(
            f"models.{role}",
            f"'{model.path}' reads a prompt in both directions and what follows in one, so that it cannot take the "
            f"turns of {where}: choose a model that reads in one direction, as of type qwen3_vl, or prompts of a "
            "dataset without an environment",
        )
    if recipe.has_later_images and family not in SEEING:
        raise RecipeError.at(
            f"models.{role}",
            f"models of type {family} read text alone, but environment.images is set: choose one that sees images, as "
            "qwen3_vl, or leave environment.images out",
        )


def _family(model: ModelConfig) -> str | None:
    """The type of a model; None where no file on this machine says it."""
    path = model_file(model, "config.json")
    if path is None:
        return None
    try:
        family = json.loads(path.read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    return family if isinstance(family, str) else None
