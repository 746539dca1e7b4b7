"""Where the tools of a recipe come from: the environment, functions and classes that it names, and MCP servers."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from leaderless.base.named_functions import is_function_name, load_callable
from leaderless.config import RecipeError, nearest
from leaderless.config.environment import EnvironmentConfig, ToolConfig
from leaderless.environments.guarded_environment import GuardedEnvironment
from leaderless.environments.protocol import Environment
from leaderless.environments.tools.calls import Tool
from leaderless.environments.tools.formats import Reader, find_reader, read_hermes
from leaderless.environments.tools.function_tool import FunctionTool, ToolOwner, tools_of
from leaderless.environments.tools.mcp_servers import McpServers
from leaderless.environments.tools.served_tools import EnvironmentTool, ServedEnvironment, served_tools
from leaderless.environments.tools.toolbox import Toolbox

if TYPE_CHECKING:
    from leaderless.data.prompts.encode import Tokenizer

BUILT_IN: Mapping[str, str] = {"python": "leaderless.environments.python_tool:PythonTool"}
"""Tools that come with the package, each as `module:function` or `module:Class`."""


class ToolSources:
    """The tools of a recipe, for one rank. Servers are started once, episodes take their tools from here.

    Attributes:
        tools: All tools, to be described to the policy.
        schemas: The tools as chat templates know them.
        reader: Reader of the format in which the policy writes calls.
    """

    def __init__(self, config: EnvironmentConfig, environment: type[Environment] | None) -> None:
        """Collect the tools, and start the servers; a program has no class.

        Raises:
            RecipeError: A tool cannot be described, two have the same name, or a server does not answer.
        """
        self._config = config
        self._own: list[FunctionTool | EnvironmentTool] = [
            *python_tools(config, environment),
            *served_tools(environment, config.options),
        ]
        self._servers = McpServers(config.mcp)
        there = [tool for tools in self._servers.tools.values() for tool in tools]
        count = Counter(tool.name for tool in [*self._own, *there])
        self._there = [
            tool if count[tool.name] == 1 else replace(tool, name=f"{tool.server}_{tool.name}") for tool in there
        ]
        self.tools: list[Tool] = [*self._own, *self._there]
        self.schemas = [tool.schema for tool in self.tools]
        self.reader: Reader = read_hermes
        try:
            _check_names(self.tools)
        except RecipeError:
            self.close()
            raise

    async def open(self, world: GuardedEnvironment) -> Toolbox:
        """The tools of an episode in its environment, to be closed with it.

        Raises:
            EnvironmentFailure: The constructor of a class has raised an error.
        """
        sessions = {name: self._servers.session(name) for name in self._servers.tools}
        own = [await world.bind(tool) for tool in self._own]
        there = [replace(tool, session=sessions[tool.server]) for tool in self._there]
        closers = [session.close for session in sessions.values()]
        told = self._config.failures.kinds_with("observation")
        return Toolbox([*own, *there], self.reader, self._config.max_result_characters, closers, told)

    def close(self) -> None:
        """End the servers that were started."""
        self._servers.close()


def python_tools(config: EnvironmentConfig, environment: type[Environment] | None) -> list[FunctionTool]:
    """The tools of an environment, and others that the recipe names, except servers' tools. Starts nothing.

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
    except TypeError as error:  # its constructor may refuse them, too
        taken = f"{found.__name__}{inspect.signature(found)}"
        raise RecipeError.at(f"{key}.options", f"{taken} does not take them: {error}") from error
    except RecipeError:
        raise
    except (ValueError, RuntimeError) as error:
        raise RecipeError.at(key, str(error)) from error
    if not tools:
        raise RecipeError.at(key, f"class '{entry.type}' has no tools: mark methods with @tool")
    return tools


_used: dict[tuple[str, bool], ToolSources] = {}
"""By the recipe's section, and whether the chat template is used; kept from step to step, as servers start slowly."""


def tool_use(
    config: EnvironmentConfig, environment: type[Environment] | None, tokenizer: Tokenizer, *, is_chat: bool
) -> ToolSources | None:
    """The tools of a recipe, the same ones until `close_tools`; None if it has none.

    Raises:
        RecipeError: They cannot be used, or their calls cannot be read.
    """
    key = config.model_dump_json(), is_chat
    if key not in _used and (own := own_tool_use(config, environment, tokenizer, is_chat=is_chat)):
        _used[key] = own
    return _used.get(key)


def own_tool_use(
    config: EnvironmentConfig, environment: type[Environment] | None, tokenizer: Tokenizer, *, is_chat: bool
) -> ToolSources | None:
    """The same, for one user alone, who closes them; a tokenizer may not be used by two threads at once."""
    is_served = environment is not None and issubclass(environment, ServedEnvironment)
    if not python_tools(config, environment) and not config.mcp and not is_served:
        return None
    sources = ToolSources(config, environment)
    if not sources.tools:
        return None
    try:
        sources.reader = find_reader(config.tool_format, tokenizer, sources.schemas, is_chat=is_chat)
    except BaseException:
        sources.close()
        raise
    return sources


def close_tools() -> None:
    """End the servers of all tools that this process uses."""
    while _used:
        _used.popitem()[1].close()
