"""The order of operations: a planner reads an expression, and a solver that sees only its numbers computes it.

The planner may say no more than which operation comes first, `*` or `+`. Without it, half of the answers are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from leaderless.environments.protocol import Environment, Task, Turn


class OrderGame(Environment):
    """One expression: the first operation, then the result."""

    agents: Sequence[str] = ("planner", "solver")

    async def reset(self, task: Task, rng: Random) -> str:  # noqa: ARG002
        """Show the planner the expression."""
        self.task, self.is_planned = task, False
        return str(task["expression"])

    async def act(self, text: str) -> Turn:
        """Pass the planner's operation on, with the numbers, or judge the solver's result."""
        if not self.is_planned:
            self.is_planned = True
            return Turn(f"{self.task['numbers']} {text if text in {'*', '+'} else '?'}", agent="solver")
        return Turn(done=True, reward=float(text == self.task["result"]))
