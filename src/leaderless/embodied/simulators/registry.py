"""Environments of bodies by name. Imports no torch, and a simulator only when it is needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from leaderless.base.named_functions import is_function_name, load_class
from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.protocol import VectorEnvironment

ADAPTERS: Mapping[str, str] = {
    "babyai": "leaderless.embodied.simulators.babyai_levels:BabyAI",
    "gymnasium": "leaderless.embodied.simulators.gymnasium_envs:GymnasiumBody",
    "isaaclab": "leaderless.embodied.simulators.isaaclab_tasks:IsaacLab",
    "libero": "leaderless.embodied.simulators.libero_tasks:Libero",
    "maniskill": "leaderless.embodied.simulators.maniskill_tasks:ManiSkill",
    "metaworld": "leaderless.embodied.simulators.metaworld_tasks:MetaWorld",
    "panda": "leaderless.embodied.simulators.gymnasium_envs:Panda",
    "pusht": "leaderless.embodied.simulators.gymnasium_envs:PushT",
}
"""Simulators of other packages, each an extra of this one, as `module:Class`."""
BUILT_IN: Mapping[str, str] = {
    **ADAPTERS,
    "faulty": "leaderless.embodied.simulators.faulty:Faulty",
    "robots": "leaderless.embodied.robots.environment:RobotEnvironment",
    "table": "leaderless.embodied.simulators.tabletop:TableTask",
    "table_in_space": "leaderless.embodied.simulators.tabletop:TableTaskInSpace",
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
