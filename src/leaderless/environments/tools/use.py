"""The tools that a rank's episodes use, kept from step to step, since starting servers takes time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leaderless.base.values import Json
from leaderless.config.environment import EnvironmentConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.guarded_environment import GuardedEnvironment
from leaderless.environments.protocol import Environment
from leaderless.environments.tools.formats import Reader
from leaderless.environments.tools.sources import ToolSources, python_tools
from leaderless.environments.tools.template import find_reader
from leaderless.environments.tools.toolbox import Toolbox


@dataclass(frozen=True)
class ToolUse:
    """How episodes use tools.

    Attributes:
        sources: Tools and servers.
        reader: Reader of the format in which the policy writes calls.
        schemas: The tools as chat templates know them.
    """

    sources: ToolSources
    reader: Reader
    schemas: Sequence[Json]

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return [tool.name for tool in self.sources.tools]

    async def open(self, world: GuardedEnvironment) -> Toolbox:
        """The tools of an episode, to be closed with it."""
        return await self.sources.open(world, self.reader)


_used: dict[tuple[str, bool], ToolUse] = {}
"""By the recipe's section, and whether the chat template is used."""


def tool_use(
    config: EnvironmentConfig, environment: type[Environment] | None, tokenizer: Tokenizer, *, is_chat: bool
) -> ToolUse | None:
    """The tools of a recipe, the same ones until `close_tools`; None if it has none.

    Args:
        config: The recipe's `environment` section.
        environment: Class of the environment; None for a program.
        tokenizer: Tokenizer of the policy.
        is_chat: Whether messages are written by the chat template.

    Raises:
        RecipeError: They cannot be used, or their calls cannot be read.
    """
    key = config.model_dump_json(), is_chat
    if key not in _used:
        use = own_tool_use(config, environment, tokenizer, is_chat=is_chat)
        if use is None:
            return None
        _used[key] = use
    return _used[key]


def own_tool_use(
    config: EnvironmentConfig, environment: type[Environment] | None, tokenizer: Tokenizer, *, is_chat: bool
) -> ToolUse | None:
    """The same, for one user alone, who closes the sources; a tokenizer may not be used by two threads at once."""
    if not python_tools(config, environment) and not config.mcp:
        return None
    sources = ToolSources(config, environment)
    try:
        reader = find_reader(config.tool_format, tokenizer, sources.schemas(), is_chat=is_chat)
    except BaseException:
        sources.close()
        raise
    return ToolUse(sources, reader, sources.schemas())


def close_tools() -> None:
    """End the servers of all tools that this process uses."""
    while _used:
        _used.popitem()[1].sources.close()
