"""Programs by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from leaderless.base.named_functions import is_function_name, load_callable
from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.packaged_files import server_refusal
from leaderless.environments.programs.program_environment import ProgramEnvironment, Solve, is_async

COMMAND = "command"
"""Type of an environment that is a command of its own."""
BUILT_IN: Mapping[str, str] = {
    COMMAND: "leaderless.environments.programs.command:Command",
    "verifiers": "leaderless.environments.adapters.verifiers_programs:Verifiers",
}
"""Programs that come with the package, each as `module:Class` of a `Solve`, whose arguments are the options."""


def program_maker(config: EnvironmentConfig) -> Callable[[], ProgramEnvironment] | None:
    """A function that makes the program of one episode; None if the recipe names no program but an environment.

    Raises:
        RecipeError: The program cannot be used.
    """
    if config.type in BUILT_IN:
        return _maker(_built_in(config), f"the program '{config.type}'", config)
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


def _built_in(config: EnvironmentConfig) -> Solve:
    found = load_callable(BUILT_IN[config.type], "environment.type", "class")
    try:
        inspect.signature(found).bind(**config.options)
    except TypeError as error:
        raise RecipeError.at(
            "environment.options", f"{config.type}{inspect.signature(found)} does not take them: {error}"
        ) from error
    return cast("Solve", found(**config.options))


def _maker(solve: Solve, name: str, config: EnvironmentConfig) -> Callable[[], ProgramEnvironment]:
    if config.isolation == "process":
        raise RecipeError.at(
            "environment.isolation",
            f"is 'process', but {name} is a program: use type=command, which has a process of its own",
        )
    is_own = config.type not in BUILT_IN
    if (not is_own or not is_async(solve)) and (problem := server_refusal()):
        other = f"; or let {name} be `async`, and ask with `await chat.ask(...)`" if is_own else ""
        raise RecipeError.at("environment.type", f"{problem}{other}")
    return partial(ProgramEnvironment, solve, name, config.act_timeout_s)
