"""Where the tools of a recipe come from: the environment, functions and classes that it names, and MCP servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from leaderless.config import Json, RecipeError, nearest
from leaderless.config.functions import is_function_name, load_callable
from leaderless.config.mcp import McpServerConfig
from leaderless.environments.protocol import Environment, EpisodeFailed
from leaderless.environments.threads import call_user
from leaderless.environments.tools.calls import Tool
from leaderless.environments.tools.formats import Reader
from leaderless.environments.tools.function_tool import FunctionTool, tools_of_class
from leaderless.environments.tools.mcp_servers import McpServers
from leaderless.environments.tools.toolbox import Toolbox

BUILT_IN: Mapping[str, str] = {}
"""Tools that come with the package, each as `module:function` or `module:Class`."""


@dataclass(frozen=True)
class _Source:
    """An entry of the recipe.

    Attributes:
        tools: Its tools; methods have no object yet.
        make: Class of which each episode gets an object; None for a function.
    """

    tools: Sequence[FunctionTool]
    make: Callable[[], object] | None


class ToolSources:
    """The tools of a recipe, for one rank. Servers are started once, episodes take their tools from here.

    Attributes:
        tools: All tools, to be described to the policy.
    """

    def __init__(
        self,
        environment: type[Environment] | None,
        names: Sequence[str] = (),
        servers: Mapping[str, McpServerConfig] | None = None,
    ) -> None:
        """Collect the tools, and start the servers.

        Args:
            environment: Class of the environment, whose methods may be tools.
            names: Functions and classes, `module:name` each; an episode has an object of each class, whose methods
                marked with `@tool` are tools.
            servers: MCP servers by name.

        Raises:
            RecipeError: A tool cannot be described, two have the same name, or a server does not answer.
        """
        self._of_environment = check_tools(environment, names)
        self._sources = [_find(name) for name in names]
        self._servers = McpServers(servers or {})
        own = [*self._of_environment, *(tool for source in self._sources for tool in source.tools)]
        there = [tool for tools in self._servers.tools.values() for tool in tools]
        count = Counter(tool.name for tool in [*own, *there])
        self._there = [tool if count[tool.name] == 1 else tool.renamed(f"{tool.server}_{tool.name}") for tool in there]
        self.tools: list[Tool] = [*own, *self._there]
        try:
            _check_names(self.tools)
        except RecipeError:
            self.close()
            raise

    def schemas(self) -> list[Json]:
        """The tools as chat templates know them."""
        return [tool.schema for tool in self.tools]

    async def open(self, environment: Environment | None, reader: Reader, max_result_characters: int) -> Toolbox:
        """The tools of an episode, to be closed with it.

        Args:
            environment: The episode's environment.
            reader: Reader of the format in which the policy writes calls.
            max_result_characters: Most characters of a result that the policy is told.

        Raises:
            EpisodeFailed: The constructor of a class has raised an error.
        """
        tools: list[Tool] = [tool.of_instance(environment) for tool in self._of_environment]
        closers: list[Callable[[], object]] = []
        for source in self._sources:
            if source.make is None:
                tools += source.tools
                continue
            name = getattr(source.make, "__name__", "")
            try:
                instance = await call_user(source.make, f"tool {name}")
            except Exception as error:
                raise EpisodeFailed(f"tool:{name}", f"the tool {name} cannot be made: {error}") from error
            tools += [tool.of_instance(instance) for tool in source.tools]
            if callable(close := getattr(instance, "close", None)):
                closers.append(close)
        sessions = {name: self._servers.session(name) for name in self._servers.tools}
        tools += [tool.in_session(sessions[tool.server]) for tool in self._there]
        closers += [session.close for session in sessions.values()]
        return Toolbox(tools, reader, max_result_characters, closers)

    def close(self) -> None:
        """End the servers that were started."""
        self._servers.close()


def check_tools(environment: type[Environment] | None, names: Sequence[str]) -> list[FunctionTool]:
    """The tools of an environment, if they and those that the recipe names can be described. Starts nothing.

    Raises:
        RecipeError: They cannot, or two of them have the same name.
    """
    try:
        own = [] if environment is None else tools_of_class(environment)
    except ValueError as error:
        raise RecipeError.at("environment.type", str(error)) from error
    _check_names([*own, *(tool for name in names for tool in _find(name).tools)])
    return own


def _check_names(tools: Sequence[Tool]) -> None:
    for name, count in Counter(tool.name for tool in tools).items():
        if count > 1:
            raise RecipeError.at(
                "environment.tools", f"{count} tools have the name '{name}': rename one, as calls are by name"
            )


def _find(name: str) -> _Source:
    """The tools of an entry of `environment.tools`."""
    key = "environment.tools"
    path = BUILT_IN.get(name, name)
    if not is_function_name(path):
        raise RecipeError.at(
            key, f"unknown tool '{name}'{nearest(name, BUILT_IN)}; a custom one is 'package.module:function'"
        )
    found = load_callable(path, key, "function")
    try:
        if not isinstance(found, type):
            return _Source([FunctionTool.of(found)], None)
        tools = tools_of_class(found)
    except ValueError as error:
        raise RecipeError.at(key, str(error)) from error
    if not tools:
        raise RecipeError.at(key, f"class '{name}' has no tools: mark methods with @tool")
    return _Source(tools, found)
