"""Notes what an environment answers, so that an episode can be played again without it. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.environments.protocol import Observation, Task, Turn
from leaderless.environments.world import World

if TYPE_CHECKING:
    from leaderless.environments.tools.calls import Tool
    from leaderless.environments.tools.function_tool import FunctionTool


@dataclass(frozen=True)
class Answer:
    """What an environment has answered: to the beginning of an episode, or to what an agent said.

    Attributes:
        turn: The answer; one to the beginning of an episode has only an observation.
        seconds: Seconds that it took.
    """

    turn: Turn
    seconds: float


class Witness(World):
    """See `World`. It asks another one, and notes the answers."""

    def __init__(self, world: World, answers: MutableSequence[Answer]) -> None:
        """Take the world to ask, and the list to which its answers are added."""
        self._world, self._answers = world, answers
        self.agents = world.agents

    async def reset(self, task: Task, seed: str) -> Observation:
        """See `World`."""
        begin = time.perf_counter()
        observation = await self._world.reset(task, seed)
        self._answers.append(Answer(Turn(observation), time.perf_counter() - begin))
        return observation

    async def act(self, text: str) -> Turn:
        """See `World`."""
        begin = time.perf_counter()
        turn = await self._world.act(text)
        self._answers.append(Answer(turn, time.perf_counter() - begin))
        return turn

    async def bind(self, tool: FunctionTool) -> Tool:
        """See `World`."""
        return await self._world.bind(tool)

    async def close(self) -> None:
        """See `World`."""
        await self._world.close()
