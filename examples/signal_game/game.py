"""The signal game: a planner sees a digit and sends one symbol, and a solver who sees only that symbol says the digit.

Nothing gives the symbols a meaning but what the two agree on while they are trained. The reward goes to the solver, who
speaks last; that the planner gets its share of it is the matter of the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from leaderless.environments.protocol import Environment, Task, Turn


class SignalGame(Environment):
    """One round: a digit, a message, an answer."""

    agents: Sequence[str] = ("planner", "solver")

    async def reset(self, task: Task, rng: Random) -> str:  # noqa: ARG002
        """Show the planner its digit."""
        self.digit, self.message = str(task["digit"]), ""
        return self.digit

    async def act(self, text: str) -> Turn:
        """Pass the planner's message on to the solver, or judge the solver's answer."""
        if not self.message:
            self.message = text or "?"
            return Turn(text, agent="solver")
        return Turn(done=True, reward=float(text == self.digit))
