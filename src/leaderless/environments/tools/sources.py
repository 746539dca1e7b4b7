"""Where the tools of a recipe come from: the environment, functions and classes that it names, and MCP servers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence

from leaderless.base.named_functions import is_function_name, load_callable
from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.config.environment import EnvironmentConfig, ToolConfig
from leaderless.environments.guarded_environment import GuardedEnvironment
from leaderless.environments.protocol import Environment
from leaderless.environments.tools.calls import Tool
from leaderless.environments.tools.formats import Reader
from leaderless.environments.tools.function_tool import FunctionTool, ToolOwner, tools_of
from leaderless.environments.tools.mcp_servers import McpServers
from leaderless.environments.tools.toolbox import Toolbox

BUILT_IN: Mapping[str, str] = {"python": "leaderless.environments.python_tool:PythonTool"}
"""Tools that come with the package, each as `module:function` or `module:Class`."""


class ToolSources:
    """The tools of a recipe, for one rank. Servers are started once, episodes take their tools from here.

    Attributes:
        tools: All tools, to be described to the policy.
    """

    def __init__(self, config: EnvironmentConfig, environment: type[Environment] | None) -> None:
        """Collect the tools, and start the servers.

        Args:
            config: The recipe's `environment` section.
            environment: Class of the environment; None for a program.

        Raises:
            RecipeError: A tool cannot be described, two have the same name, or a server does not answer.
        """
        self._config = config
        self._own = python_tools(config, environment)
        self._servers = McpServers(config.mcp)
        there = [tool for tools in self._servers.tools.values() for tool in tools]
        count = Counter(tool.name for tool in [*self._own, *there])
        self._there = [tool if count[tool.name] == 1 else tool.renamed(f"{tool.server}_{tool.name}") for tool in there]
        self.tools: list[Tool] = [*self._own, *self._there]
        try:
            _check_names(self.tools)
        except RecipeError:
            self.close()
            raise

    def schemas(self) -> list[Json]:
        """The tools as chat templates know them."""
        return [tool.schema for tool in self.tools]

    async def open(self, world: GuardedEnvironment, reader: Reader) -> Toolbox:
        """The tools of an episode, to be closed with it.

        Args:
            world: The episode's environment.
            reader: Reader of the format in which the policy writes calls.

        Raises:
            Failure: The constructor of a class has raised an error.
        """
        sessions = {name: self._servers.session(name) for name in self._servers.tools}
        own = [await world.bind(tool) for tool in self._own]
        there = [tool.in_session(sessions[tool.server]) for tool in self._there]
        closers = [session.close for session in sessions.values()]
        return Toolbox([*own, *there], reader, self._config.max_result_characters, closers)

    def close(self) -> None:
        """End the servers that were started."""
        self._servers.close()


def python_tools(config: EnvironmentConfig, environment: type[Environment] | None) -> list[FunctionTool]:
    """The tools of an environment, and others that the recipe names, except servers' tools. Starts nothing.

    Args:
        config: The recipe's `environment` section.
        environment: Class of the environment; None for a program, which has none.

    Raises:
        RecipeError: One of them cannot be described, or two have the same name; or a program is given tools.
    """
    if environment is None:
        for key, value in (("tools", config.tools), ("mcp", config.mcp)):
            if value:
                raise RecipeError.at(
                    f"environment.{key}", "is for environments; a program calls its tools itself, and says which it has"
                )
        return []
    try:
        tools = tools_of(ToolOwner(environment, config.options, is_environment=True))
    except ValueError as error:
        raise RecipeError.at("environment.type", str(error)) from error
    for place, entry in enumerate(config.tools):
        tools += _tools_of_entry(entry, f"environment.tools.{place}")
    _check_names(tools)
    return tools


def _check_names(tools: Sequence[Tool]) -> None:
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise RecipeError.at(
                "environment.tools", f"{count} tools have the name '{name}': rename one, as calls are by name"
            )


def _tools_of_entry(entry: ToolConfig, key: str) -> list[FunctionTool]:
    """The tools of an entry of `environment.tools`."""
    path = BUILT_IN.get(entry.type, entry.type)
    if not is_function_name(path):
        hint = nearest(entry.type, BUILT_IN)
        raise RecipeError.at(key, f"unknown tool '{entry.type}'{hint}; a custom one is 'package.module:function'")
    found = load_callable(path, key, "function")
    try:
        if not isinstance(found, type):
            if entry.options:
                raise RecipeError.at(f"{key}.options", f"'{entry.type}' is a function: only a class takes options")
            return [FunctionTool.of(found)]
        inspect.signature(found).bind(**entry.options)
        if entry.type in BUILT_IN:
            found(**entry.options)  # it starts nothing yet, and says whether it can work on this machine
        tools = tools_of(ToolOwner(found, entry.options))
    except TypeError as error:
        taken = f"{found.__name__}{inspect.signature(found)}"
        raise RecipeError.at(f"{key}.options", f"{taken} does not take them: {error}") from error
    except RecipeError:
        raise
    except (ValueError, RuntimeError) as error:
        raise RecipeError.at(key, str(error)) from error
    if not tools:
        raise RecipeError.at(key, f"class '{entry.type}' has no tools: mark methods with @tool")
    return tools
