"""Environments by name. Imports no torch, and an environment only when it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from leaderless.base.named_functions import check_options, is_function_name, load_class, name_of
from leaderless.config import RecipeError, nearest
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.guarded_environment import EnvironmentFailure, GuardedEnvironment, ThreadEnvironment
from leaderless.environments.programs.program_environment import BUILT_IN as PROGRAMS
from leaderless.environments.programs.program_environment import ProgramEnvironment, program_maker
from leaderless.environments.protocol import ONLY_AGENT, Environment
from leaderless.environments.remote import ProcessEnvironment
from leaderless.environments.tools.served_tools import ServedEnvironment
from leaderless.environments.tools.sources import python_tools

BUILT_IN: Mapping[str, str] = {
    "calculator": "leaderless.environments.calculator:Calculator",
    "gymnasium": "leaderless.environments.adapters.gymnasium_text:GymnasiumEnvironment",
    "openenv": "leaderless.environments.adapters.openenv_environment:OpenEnv",
    "reasoning_gym": "leaderless.environments.adapters.reasoning_gym_tasks:ReasoningGym",
    "search_r1": "leaderless.environments.search.search_r1:SearchR1",
    "textarena": "leaderless.environments.adapters.textarena_games:TextArena",
    "textarena_solo": "leaderless.environments.adapters.textarena_games:TextArenaSolo",
}
"""Environments that come with the package, each as `module:Class`."""


def find_environment(config: EnvironmentConfig) -> type[Environment]:
    """The environment that a recipe names.

    Raises:
        RecipeError: There is no such environment, or its constructor does not take the options.
    """
    name = BUILT_IN.get(config.type, config.type)
    if not is_function_name(name):
        hint = nearest(name, [*BUILT_IN, *PROGRAMS])
        raise RecipeError.at(
            "environment.type", f"unknown environment '{name}'{hint}; a custom one is 'package.module:Class'"
        )
    found = load_class(name, "environment.type", Environment)  # type: ignore[type-abstract]
    check_options(found, config.options, "environment.options")
    agents = tuple(found.agents)
    if not agents or len(set(agents)) < len(agents):
        raise RecipeError.at("environment.type", f"{found.__name__}.agents must be one or more different names")
    if config.agents and set(config.agents) != set(agents):
        raise RecipeError.at(
            "environment.agents",
            f"names {', '.join(config.agents)}, but {found.__name__} has the agents {', '.join(agents)}: give a role "
            "for each of these",
        )
    return found


def environment_class(config: EnvironmentConfig) -> type[Environment] | None:
    """The environment that a recipe names; None if it names a program. Errors as of `world_maker`."""
    return find_environment(config) if program_maker(config) is None else None


def agents_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the agents of the environment that a recipe names. Errors as of `world_maker`."""
    return named_agents(config) or (ONLY_AGENT,)


def named_agents(config: EnvironmentConfig) -> tuple[str, ...]:
    """The same, but none of a program: a fact for plans, as are `named_tools`."""
    found = environment_class(config)
    return () if found is None else tuple(found.agents)


def named_tools(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the tools, except servers' tools, once all of the section has been checked."""
    world_maker(config)
    return tuple(tool.name for tool in python_tools(config, environment_class(config)))


def world_maker(config: EnvironmentConfig) -> Callable[[], GuardedEnvironment | ProgramEnvironment]:
    """A function that makes the environment or the program of one episode.

    Raises:
        RecipeError: There is no such environment or program, or it does not take the options.
    """
    program = program_maker(config)
    if program is not None:
        return program
    found = find_environment(config)
    if config.isolation == "process" and issubclass(found, ServedEnvironment):
        raise RecipeError.at(
            "environment.isolation", f"is 'process', but the server of {found.__name__} has processes of its own"
        )
    if config.isolation == "process" or found.needs_own_process:
        return partial(ProcessEnvironment, config, tuple(found.agents), name_of(found))
    make = partial(found, **config.options)
    return partial(ThreadEnvironment, make, config.act_timeout_s, found.agents, shows_images=config.images)


def try_environment(config: EnvironmentConfig) -> None:
    """Make the environment that a recipe names once, and release it. Of a program, what it needs is checked.

    What is wrong with its options is found before models are loaded, and not by the first episode.

    Raises:
        RecipeError: It cannot be made.
    """
    world = world_maker(config)()
    assert isinstance(world, ThreadEnvironment | ProcessEnvironment | ProgramEnvironment)

    async def make() -> None:
        try:
            await world.make()
        finally:
            await world.close()

    try:
        with ThreadPoolExecutor(1) as thread:  # notebooks have an event loop of their own in this one
            thread.submit(asyncio.run, make()).result()
    except EnvironmentFailure as failure:
        if isinstance(failure.__cause__, RecipeError):
            known = failure.__cause__.problems
            raise RecipeError([replace(one, key=one.key or "environment") for one in known]) from failure
        raise RecipeError.at("environment", str(failure)) from failure
