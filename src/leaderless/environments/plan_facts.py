"""Facts for a plan about the environment that a recipe names; see `leaderless.planner.workflow.products`."""

from __future__ import annotations

from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.registry import environment_class, world_maker
from leaderless.environments.tools.sources import python_tools


def agents_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the agents of an environment; none of a program."""
    found = environment_class(config)
    return () if found is None else tuple(found.agents)


def tools_of(config: EnvironmentConfig) -> tuple[str, ...]:
    """Names of the tools, except servers' tools, once all of the section has been checked."""
    world_maker(config)
    return tuple(tool.name for tool in python_tools(config, environment_class(config)))
