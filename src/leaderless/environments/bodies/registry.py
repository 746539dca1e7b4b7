"""Environments of bodies by name. Imports no torch, and a simulator only when it is needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.body import BodyConfig
from leaderless.config.functions import is_function_name, load_class
from leaderless.environments.bodies.protocol import VectorEnvironment

ADAPTERS: Mapping[str, str] = {
    "babyai": "leaderless.environments.bodies.adapters.babyai:BabyAI",
    "gymnasium": "leaderless.environments.bodies.adapters.gymnasium:GymnasiumBody",
    "isaaclab": "leaderless.environments.bodies.adapters.isaaclab:IsaacLab",
    "libero": "leaderless.environments.bodies.adapters.libero:Libero",
    "maniskill": "leaderless.environments.bodies.adapters.maniskill:ManiSkill",
    "metaworld": "leaderless.environments.bodies.adapters.metaworld:MetaWorld",
    "panda": "leaderless.environments.bodies.adapters.gymnasium:Panda",
    "pusht": "leaderless.environments.bodies.adapters.gymnasium:PushT",
}
"""Simulators of other packages, each an extra of this one, as `module:Class`."""
BUILT_IN: Mapping[str, str] = {
    **ADAPTERS,
    "faulty": "leaderless.environments.bodies.faults:Faulty",
    "robots": "leaderless.robots.environment:RobotEnvironment",
    "table": "leaderless.environments.bodies.table:Table",
    "table_in_space": "leaderless.environments.bodies.table:TableInSpace",
}
"""Environments that come with the package, each as `module:Class`."""


def find_body(config: BodyConfig) -> type[VectorEnvironment]:
    """The environment that a recipe names.

    Raises:
        RecipeError: There is no such environment, or its constructor does not take the options.
    """
    name = BUILT_IN.get(config.type, config.type)
    if not is_function_name(name):
        raise RecipeError.at(
            "body.type",
            f"unknown environment '{name}'{nearest(name, BUILT_IN)}; a custom one is 'package.module:Class'",
        )
    found = load_class(name, "body.type", VectorEnvironment)  # type: ignore[type-abstract]
    try:
        inspect.signature(found).bind(1, **config.options)
    except TypeError as error:
        raise RecipeError.at(
            "body.options", f"{found.__name__}{inspect.signature(found)} does not take them: {error}"
        ) from error
    return found


def open_body(config: BodyConfig, num: int) -> VectorEnvironment:
    """Make the environment that a recipe names, with room for some episodes.

    Raises:
        RecipeError: It cannot be made, or its episodes may be longer than the recipe says.
    """
    try:
        environment = find_body(config)(num, **config.options)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        raise RecipeError.at("body", f"environment '{config.type}' cannot be made: {error}") from error
    if environment.spaces.max_steps > config.max_steps:
        environment.close()
        raise RecipeError.at(
            "body.max_steps",
            f"is {config.max_steps}, but episodes of '{config.type}' have up to {environment.spaces.max_steps} steps: "
            "raise it",
        )
    return environment


def check_recipe(recipe: Recipe) -> None:
    """Make the environment of a recipe once, with room for one episode; errors as of `open_body`."""
    assert recipe.body is not None
    open_body(recipe.body, 1).close()
