"""Episodes: the environment in which the policy acts, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue

from leaderless.config.base import ShorthandSection


class EnvironmentConfig(ShorthandSection):
    """The environment in which the policy acts. A row of the dataset is a task, and a response an episode."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Environment, a class `package.module:Class` derived from `leaderless.environments.Environment`; or a program that
    leads the episode, a function `package.module:function` or `command`; see
    [Programs that lead episodes](../guides/programs.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor; for a program, further arguments."""
    max_turns: int = Field(default=8, ge=1)
    """Number of messages of the policy after which an episode that is not over is cut."""
    max_episode_tokens: int = Field(default=2048, ge=1)
    """Tokens after a prompt of `data.max_prompt_tokens`, of what the policy says and what it is told, at which an
    episode is cut."""
    on_overflow: Literal["cut", "fail"] = "cut"
    """What becomes of an episode that is longer: it is cut and keeps its reward so far, or it fails."""
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
