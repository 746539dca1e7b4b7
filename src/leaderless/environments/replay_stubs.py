"""Replacements for policy, environment and tools when an episode is played again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from leaderless.data.prompts.images import PromptImage
from leaderless.environments.episode import Episode
from leaderless.environments.episode_trace import TraceNode
from leaderless.environments.guarded_environment import CRASH, TIMEOUT, EnvironmentFailure, GuardedEnvironment
from leaderless.environments.journal_difference import DIFFERENT
from leaderless.environments.protocol import Observation, Task, Turn
from leaderless.environments.tools import Call, CallResult, Toolbox
from leaderless.environments.tools.calls import Tool
from leaderless.environments.tools.formats import Reader
from leaderless.environments.tools.function_tool import FunctionTool
from leaderless.environments.tools.use import ToolUse
from leaderless.rollout.engine import Completion, FinishReason, SamplingParams


class JournalScheduler:
    """Gives the answers of the journal, as long as the policy is asked the same.

    Programs may ask several questions at the same time, so an answer is found by what it follows on.
    """

    def __init__(self, said: Sequence[TraceNode]) -> None:
        self._left = list(said)

    async def ask(
        self,
        prompt: Sequence[int],
        sample_id: int,  # noqa: ARG002
        params: SamplingParams,  # noqa: ARG002
        conversation: int | None = None,  # noqa: ARG002
        known_tokens: int = 0,  # noqa: ARG002
        images: tuple[PromptImage, ...] = (),  # noqa: ARG002
    ) -> Completion:
        """Find the answer that follows on the prompt in the journal."""
        contexts = ([] if node.parent is None else node.parent.context() for node in self._left)
        place = next((place for place, context in enumerate(contexts) if context == list(prompt)), None)
        if place is None:
            raise EnvironmentFailure(
                DIFFERENT, f"the policy is asked what it was not asked then: {len(self._left)} answers are left"
            )
        node = self._left.pop(place)
        said = node.said
        assert said is not None, "only what the policy said is given"
        reason: FinishReason = "length" if said.is_truncated else "stop"
        return Completion(list(node.tokens), list(said.log_probs), reason, list(said.policy_versions))

    def forget(self, conversation: int) -> None:
        """Do nothing: no conversation is kept."""


class JournalEnvironment(GuardedEnvironment):
    """Environment that answers what the journal says."""

    def __init__(self, episode: Episode) -> None:
        self.agents, self._episode, self._answers = episode.agents, episode, iter(episode.answers)

    @override
    async def reset(self, task: Task, seed: str) -> Observation:
        return self._next().observation

    @override
    async def act(self, text: str) -> Turn:
        return self._next()

    @override
    async def bind(self, tool: FunctionTool) -> Tool:
        return tool

    @override
    async def close(self) -> None:
        """Do nothing: a journal needs no release."""

    def _next(self) -> Turn:
        answer = next(self._answers, None)
        if answer is None:
            raise failure_in(self._episode)
        return answer.turn


class UpToFailure(GuardedEnvironment):
    """The environment that answers, up to where the episode was ended by a time limit or a crash."""

    def __init__(self, world: GuardedEnvironment, episode: Episode) -> None:
        self.agents, self._world, self._episode, self._num_answers = world.agents, world, episode, 0

    @override
    async def reset(self, task: Task, seed: str) -> Observation:
        self._count()
        return await self._world.reset(task, seed)

    @override
    async def act(self, text: str) -> Turn:
        self._count()
        return await self._world.act(text)

    @override
    async def bind(self, tool: FunctionTool) -> Tool:
        return await self._world.bind(tool)

    @override
    async def close(self) -> None:
        await self._world.close()

    def _count(self) -> None:
        if self._num_answers == len(self._episode.answers) and self._episode.cause in {TIMEOUT, CRASH}:
            raise failure_in(self._episode)
        self._num_answers += 1


class JournalToolbox(Toolbox):
    """The tools of one episode: its environment's, and answers of others as they are in the journal."""

    def __init__(self, own: Iterable[Tool], reader: Reader, max_result_characters: int, episode: Episode) -> None:
        super().__init__(own, reader, max_result_characters)
        self._episode, self._left = episode, list(episode.calls)

    @override
    async def run(self, calls: Sequence[Call], timeout_s: float) -> list[CallResult]:
        known, self._left = self._left[: len(calls)], self._left[len(calls) :]
        own = [call for call in calls if call.name in self.tools and not call.problem]
        if len(known) < len(calls) and (len(own) < len(calls) or self._episode.cause in {TIMEOUT, CRASH}):
            raise failure_in(self._episode)
        found = iter(await super().run(own, timeout_s))
        return [
            next(found) if call.name in self.tools and not call.problem else known[place]
            for place, call in enumerate(calls)
        ]


@dataclass(frozen=True)
class JournalTools(ToolUse):
    """Tools of which only the environment's are called.

    Attributes:
        episode: Episode as it is in the journal.
        max_result_characters: Most characters of a result that the policy gets.
        has_environment: Whether there is an environment; without one, all answers are from the journal.
    """

    episode: Episode
    max_result_characters: int
    has_environment: bool

    @override
    async def open(self, world: GuardedEnvironment) -> Toolbox:
        tools = [tool for tool in self.sources.tools if isinstance(tool, FunctionTool)] if self.has_environment else []
        own = [await world.bind(tool) for tool in tools if tool.home is not None and tool.home.is_environment]
        return JournalToolbox(own, self.reader, self.max_result_characters, self.episode)


def failure_in(episode: Episode) -> EnvironmentFailure:
    """How an episode of the journal has ended, where more is wanted of it than it holds."""
    return EnvironmentFailure(
        episode.cause or DIFFERENT, episode.error or "the environment is asked for one more answer"
    )
