"""Facts for a plan about the environment that a recipe names.

Environments are classes and functions of users, and so is this module's knowledge of them: it is asked for by name, as
the code of stages is.
"""

from __future__ import annotations

from typing import cast

from leaderless.base.named_functions import load_function
from leaderless.config.environment import EnvironmentConfig

FACTS = "leaderless.environments.plan_facts"
"""Module whose functions say what the environment of a recipe is like, each from the recipe's section."""


def agents_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the agents of an environment; none of a program, which has one without a name.

    Raises:
        RecipeError: There is no such environment, or its constructor does not take the options.
    """
    return _ask("agents_of", config)


def tools_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the tools of an environment, and of tools that the recipe adds, without tools of servers.

    Raises:
        RecipeError: As of `agents_of`; or a tool cannot be described, or two have the same name.
    """
    return _ask("tools_of", config)


def _ask(name: str, config: EnvironmentConfig) -> tuple[str, ...]:
    return cast("tuple[str, ...]", load_function(f"{FACTS}:{name}", "environment.type", 1)(config))
