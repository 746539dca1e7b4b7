"""Programs by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import cast

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.functions import is_function_name, load_callable
from leaderless.environments.programs.command import Command
from leaderless.environments.programs.doorway import doorway_refusal
from leaderless.environments.programs.world import ProgramWorld, Solve, is_async

COMMAND = "command"
"""Type of an environment that is a command of its own."""


def program_maker(config: EnvironmentConfig) -> Callable[[], ProgramWorld] | None:
    """A function that makes the program of one episode; None if the recipe names no program but an environment.

    Raises:
        RecipeError: The program cannot be used.
    """
    if config.type == COMMAND:
        return _maker(cast("Solve", _command(config)), "the command", config)
    if not is_function_name(config.type):
        return None
    found = load_callable(config.type, "environment.type", "class or function")
    if isinstance(found, type):
        return None
    name = config.type.rpartition(":")[2]
    try:
        inspect.signature(found).bind("task", "chat", **config.options)
    except TypeError as error:
        raise RecipeError.at(
            "environment.type",
            f"{name}{inspect.signature(found)} must be callable as {name}(task, chat, **options): {error}",
        ) from error
    return _maker(cast("Solve", partial(found, **config.options)), name, config)


def _command(config: EnvironmentConfig) -> Command:
    try:
        inspect.signature(Command).bind(**config.options)
    except TypeError as error:
        raise RecipeError.at("environment.options", f"must be command, env and confine: {error}") from error
    return Command(**config.options)  # type: ignore[arg-type]


def _maker(solve: Solve, name: str, config: EnvironmentConfig) -> Callable[[], ProgramWorld]:
    if config.isolation == "process":
        raise RecipeError.at(
            "environment.isolation",
            f"is 'process', but {name} is a program: use type=command, which has a process of its own",
        )
    if (config.type == COMMAND or not is_async(solve)) and (problem := doorway_refusal()):
        raise RecipeError.at("environment.type", problem)
    return partial(ProgramWorld, solve, name, config.act_timeout_s)
