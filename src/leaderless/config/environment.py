"""Episodes: the environment in which the policy acts, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from leaderless.base.errors import RecipeError, nearest
from leaderless.base.named_functions import is_function_name, load_function
from leaderless.base.section import ShorthandSection
from leaderless.config.mcp_servers import McpServerConfig

TOOL_FORMATS = ("hermes", "llama", "qwen3_coder", "mistral")
"""Built-in formats in which policies write calls of tools."""
FORMAT_KEY = "environment.tool_format"
"""Setting that names a format."""


class ToolConfig(ShorthandSection):
    """A function that the policy may call, or a class with methods that it may call."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Function `package.module:function`, or class `package.module:Class`, of which each episode has an object; or
    `python`, an interpreter in a sandbox."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of the constructor of a class."""


class EnvironmentConfig(ShorthandSection):
    """The environment in which the policy acts. A row of the dataset is a task, and a response an episode."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Environment: a built-in one (`calculator`, `gymnasium`, `reasoning_gym`, `search_r1`, `textarena` or
    `textarena_solo`), or a class `package.module:Class` derived from `leaderless.Environment`; or a program that leads
    the episode, a function `package.module:function`, `command`, or `verifiers`; see
    [Programs that lead episodes](../guides/programs.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor; for a program, further arguments."""
    agents: Mapping[str, str] = {}
    """Role that plays each of the environment's agents, by the name of the agent; by default, the role of the rollout
    plays all of them."""
    max_turns: int = Field(default=8, ge=1)
    """Number of messages of the policy after which an episode that is not over is cut."""
    max_episode_tokens: int = Field(default=2048, ge=1)
    """Tokens of the policy and of the environment after a prompt of `data.max_prompt_tokens`, at which an episode is
    cut."""
    on_overflow: Literal["cut", "fail"] = "cut"
    """Treatment of an episode that is longer: it is cut and keeps its reward so far, or it fails."""
    act_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one answer of the environment may take, or that a program may take between two questions; then the
    episode fails."""
    max_attempts: int = Field(default=1, ge=1)
    """Times that an episode is tried, before it counts as failed."""
    concurrency: int = Field(default=256, ge=1)
    """Number of episodes that one rank plays at the same time."""
    isolation: Literal["thread", "process"] = "thread"
    """`thread` calls methods that are not `async` in threads; `process` plays each episode in a process of its own,
    which may crash or hang without harm. Environments that use global random numbers ask for processes by
    themselves."""
    images: bool = False
    """Whether messages to the policy may have images, for a model that sees them; see
    [Models that see images](../guides/images.md#images-in-episodes)."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools that the policy may call, in addition to the environment's methods marked with `@tool`."""
    mcp: Mapping[str, McpServerConfig] = {}
    """Servers of the Model Context Protocol, whose tools the policy may call, by name."""
    tool_format: str = Field(default="auto", min_length=1)
    """How the policy writes calls: `hermes`, `llama`, `qwen3_coder`, `mistral`, a custom `package.module:function`, or
    `auto` for the format in which the chat template writes them."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a call of a tool may take; then the episode fails."""
    max_result_characters: int = Field(default=4000, ge=2)
    """Characters of a tool's result that the policy reads; the middle of a longer one is left out."""


def custom_reader(name: str, key: str = FORMAT_KEY) -> Callable[..., object] | None:
    """The function that reads calls in a user's format; None for a built-in format, or for `auto`.

    Raises:
        RecipeError: There is no such format; the error is at the key.
    """
    if name in {"auto", *TOOL_FORMATS}:
        return None
    if not is_function_name(name):
        hint = nearest(name, [*TOOL_FORMATS, "auto"])
        raise RecipeError.at(key, f"unknown format '{name}'{hint}; a custom one is 'package.module:function'")
    return load_function(name, key, 1)
