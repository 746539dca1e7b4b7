"""An environment with a tool, and tools, for tests; imports no torch, so that processes of episodes start fast."""

from __future__ import annotations

import os
import time
from random import Random

from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.environments.tools import ToolError, tool


class Sums(Environment):
    """The answer is to be the sum of what was counted."""

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        self.sum = 0
        return f"Count{task.get('n', '')}:"

    @tool
    def count(self, by: int) -> int:
        """Count on.

        Args:
            by: Number to add.
        """
        self.sum += by
        return self.sum

    def act(self, text: str) -> Turn:
        return Turn(reward=float(text == str(self.sum)), done=True)


def flood() -> str:
    """Say a lot."""
    return "x" * 10_000_000


def grumble() -> str:
    """Refuse at length."""
    raise ToolError("x" * 1000)


def hang() -> str:
    """Take long."""
    time.sleep(30)
    return ""


def crash() -> str:
    """End the process."""
    os.abort()
