"""Notes what an environment answers, so that an episode can be played again without it. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from leaderless.environments.guarded_environment import GuardedEnvironment
from leaderless.environments.protocol import Observation, Task, Turn

if TYPE_CHECKING:
    from leaderless.environments.tools.calls import Tool
    from leaderless.environments.tools.function_tool import FunctionTool


@dataclass(frozen=True)
class RecordedAnswer:
    """Answer of an environment: to the beginning of an episode, or to what an agent said.

    Attributes:
        turn: The answer; one to the beginning of an episode has only an observation.
        seconds: Seconds that it took.
    """

    turn: Turn
    seconds: float


class AnswerRecorder(GuardedEnvironment):
    """Asks another environment, and notes the answers."""

    def __init__(self, world: GuardedEnvironment, answers: MutableSequence[RecordedAnswer]) -> None:
        self._world, self._answers = world, answers
        self.agents = world.agents

    @override
    async def reset(self, task: Task, seed: str) -> Observation:
        begin = time.perf_counter()
        observation = await self._world.reset(task, seed)
        self._answers.append(RecordedAnswer(Turn(observation), time.perf_counter() - begin))
        return observation

    @override
    async def act(self, text: str) -> Turn:
        begin = time.perf_counter()
        turn = await self._world.act(text)
        self._answers.append(RecordedAnswer(turn, time.perf_counter() - begin))
        return turn

    @override
    async def bind(self, tool: FunctionTool) -> Tool:
        return await self._world.bind(tool)

    @override
    async def close(self) -> None:
        await self._world.close()
