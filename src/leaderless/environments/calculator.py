"""Sums that a policy may work out in its head or with a tool."""

from __future__ import annotations

import re
from random import Random

from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.environments.tools import ToolError, tool


class Calculator(Environment):
    """A question with a calculator. A right answer is worth 1, and each use of the calculator costs something."""

    def __init__(self, cost: float = 0.1) -> None:
        self._cost = cost

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        """Ask the question of the task's column `question`; `answer` is what is right."""
        self._answer, self._num_calls = str(task["answer"]), 0
        return str(task["question"])

    @tool
    def calculate(self, expression: str) -> str:
        """Add numbers.

        Args:
            expression: Whole numbers with plus signs, such as 12+345.
        """
        self._num_calls += 1
        if not re.fullmatch(r"\d{1,18}(\+\d{1,18})*", expression):
            raise ToolError("expression must be whole numbers with plus signs between them, such as 12+345")
        return str(sum(map(int, expression.split("+"))))

    def act(self, text: str) -> Turn:
        """Take the answer."""
        is_right = text.strip() == self._answer
        return Turn(reward=is_right - self._cost * self._num_calls, done=True)
