"""Whether models can see what they are shown, and take part in conversations, as far as files on this machine show."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.config import Recipe, RecipeError
from leaderless.planner.families import family_of
from leaderless.planner.parts import PlannedNode, RoleInstance, answering

SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "paligemma")
"""Types of the models of images and text that are supported."""
REWARD_MODELS = ("update_reward_model", "model_reward")
"""Stages whose models score whole responses."""
BOTH_WAYS = ("paligemma",)
"""Types of the models whose tokens of a prompt attend to all of it."""
ONE_WAY_ENGINES = ("vllm", "sglang")
"""Engines whose tokens attend to those before them alone."""


def check_sight(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> None:
    """Refuse models that cannot take the turns of the environment, or see what they are shown, or be divided as asked.

    Raises:
        RecipeError: The configuration of such a model is on this machine, and says so.
    """
    engines = {instance.role: instance.engine for instance in instances if not instance.is_critic}
    for role in players_of(recipe, nodes, instances):
        if (family := family_of(recipe.model_of(role))) is not None:
            check_player(recipe, role, family)
            _check_engine(recipe, role, family, engines.get(role))
    for role in scorers_of(nodes):
        if (family := family_of(recipe.model_of(role))) is not None:
            check_scorer(recipe, role, family)
    # A layout that is written is blamed before one that follows from it.
    for node in sorted(nodes, key=lambda node: node.name not in recipe.layout):
        for role in (role for role, use in node.uses if use != "generate"):
            _check_division(node, role, family_of(recipe.model_of(role)))


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
    where = {"episodes": "an environment", "online": "clients"}.get(recipe.product)
    if family in BOTH_WAYS and where is not None:
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


def scorers_of(nodes: Sequence[PlannedNode]) -> list[str]:
    """The roles whose models score whole responses."""
    return list(dict.fromkeys(node.node.role for node in nodes if node.node.role and node.node.run in REWARD_MODELS))


def check_scorer(recipe: Recipe, role: str, family: str) -> None:
    """Refuse a reward model by its type; see `check_player`.

    Raises:
        RecipeError: It reads text alone, and prompts have images.
    """
    if recipe.data.has_images and family not in SEEING:
        raise RecipeError.at(
            f"models.{role}",
            f"models of type {family} read text alone, so that the reward model would see no images, which prompts "
            "have (data): choose one that sees images, as qwen3_vl, or give prompts of text",
        )


def _check_engine(recipe: Recipe, role: str, family: str, engine: str | None) -> None:
    """Refuse engines that read prompts in one direction for a model that reads them in both."""
    if family in BOTH_WAYS and engine in ONE_WAY_ENGINES:
        raise RecipeError.at(
            recipe.key_of("rollout.engine", role),
            f"'{engine}' is not supported for models of type {family}, which read a prompt in both directions: set it "
            "to native",
        )


def _check_division(node: PlannedNode, role: str, family: str | None) -> None:
    """Refuse a layout that divides more than the rows and the weights of a model that reads in both directions."""
    layout = node.layout
    axes = [axis for axis, size in (*layout.sizes.items(), ("ep", layout.ep)) if axis != "dp" and size > 1]
    if family in BOTH_WAYS and axes:
        raise RecipeError.at(
            f"layout.{node.name}.{axes[0]}",
            f"the model of '{role}' is of type {family} and reads a prompt in both directions, and ranks divide such a "
            f"model along dp alone: leave out {' and '.join(axes)}",
        )
