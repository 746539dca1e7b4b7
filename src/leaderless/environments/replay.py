"""Plays episodes of a journal again, without a model, and finds the first difference.

Policy, environment and tools are replaced by what gives the journal's answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from typing_extensions import override

from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.engine_scheduler import EngineScheduler
from leaderless.environments.episode import Episode, EpisodePosition, Spoken, TraceNode
from leaderless.environments.guarded_environment import EnvironmentFailure, GuardedEnvironment
from leaderless.environments.journal import DIFFERENT, JournalDifference, Line, episode_of, first_difference, line_of
from leaderless.environments.player import EpisodePlayer
from leaderless.environments.programs.program_environment import ProgramEnvironment, program_maker
from leaderless.environments.protocol import Observation, Task, Turn
from leaderless.environments.tools import Call, CallResult, Toolbox
from leaderless.environments.tools.calls import Tool
from leaderless.environments.tools.function_tool import FunctionTool
from leaderless.environments.tools.served_tools import EnvironmentTool
from leaderless.environments.tools.sources import ToolSources
from leaderless.environments.user_functions import run_to_end
from leaderless.rollout.engine import Completion, FinishReason, Request, SamplingParams

FROM_OUTSIDE: frozenset[str] = frozenset({"deadline", "sandbox", "infrastructure"})
"""Kinds of failures that do not come again when an episode is played again."""


class JournalScheduler(EngineScheduler):
    """Gives the answers of the journal, as long as the policy is asked the same.

    Programs may ask several questions at the same time, so an answer is found by what it follows on.
    """

    def __init__(self, said: Sequence[TraceNode]) -> None:
        self._left = list(said)

    @override
    async def ask(self, request: Request, params: SamplingParams, known_tokens: int = 0) -> Completion:
        contexts = ([] if node.parent is None else node.parent.context() for node in self._left)
        place = next((place for place, context in enumerate(contexts) if context == list(request.prompt)), None)
        if place is None:
            raise EnvironmentFailure(
                DIFFERENT, f"the policy is asked what it was not asked then: {len(self._left)} answers are left"
            )
        node = self._left.pop(place)
        said = node.said
        assert said is not None, "only what the policy said is given"
        reason: FinishReason = "length" if said.is_truncated else "stop"
        return Completion(list(node.tokens), list(said.log_probs), reason, list(said.policy_versions))

    @override
    def forget(self, conversation: int) -> None:
        """Do nothing: no conversation is kept."""


class JournalEnvironment(GuardedEnvironment):
    """The environment of an episode of the journal, up to where something from outside has ended it.

    Without a world it gives the answers of the journal.
    """

    def __init__(self, episode: Episode, world: GuardedEnvironment | None) -> None:
        self.agents = episode.agents if world is None else world.agents
        self._episode, self._world, self._answers = episode, world, iter(episode.answers)

    @override
    async def reset(self, task: Task, seed: str) -> Observation:
        known = self._next()
        return known.observation if self._world is None else await self._world.reset(task, seed)

    @override
    async def act(self, text: str) -> Turn:
        known = self._next()
        return known if self._world is None else await self._world.act(text)

    @override
    async def bind(self, tool: FunctionTool | EnvironmentTool) -> Tool:
        return tool if self._world is None else await self._world.bind(tool)

    @override
    async def close(self) -> None:
        if self._world is not None:
            await self._world.close()

    def _next(self) -> Turn:
        """The next answer in the journal, or an empty one after the last if the environment may give more."""
        answer = next(self._answers, None)
        if answer is None and (self._world is None or self._episode.cause in FROM_OUTSIDE):
            raise failure_in(self._episode)
        return Turn() if answer is None else answer.turn


class JournalToolbox(Toolbox):
    """The tools of one episode: its environment's, and answers of others as they are in the journal."""

    def __init__(self, own: Iterable[Tool], sources: ToolSources, config: EnvironmentConfig, episode: Episode) -> None:
        super().__init__(
            own, sources.reader, config.max_result_characters, told=config.failures.kinds_with("observation")
        )
        self._episode, self._left = episode, list(episode.calls)

    @override
    async def run(self, calls: Sequence[Call], timeout_s: float) -> list[CallResult]:
        known, self._left = self._left[: len(calls)], self._left[len(calls) :]
        own = [call for call in calls if call.name in self.tools and not call.problem]
        if len(known) < len(calls) and (len(own) < len(calls) or self._episode.cause in FROM_OUTSIDE):
            raise failure_in(self._episode)
        found = iter(await super().run(own, timeout_s))
        return [
            next(found) if call.name in self.tools and not call.problem else known[place]
            for place, call in enumerate(calls)
        ]


def failure_in(episode: Episode) -> EnvironmentFailure:
    """How an episode of the journal has ended, where more is wanted of it than it holds."""
    return EnvironmentFailure(
        episode.cause or DIFFERENT, episode.error or "the environment is asked for one more answer"
    )


def replay(
    lines: Sequence[Line],
    config: EnvironmentConfig,
    open_world: Callable[[], GuardedEnvironment | ProgramEnvironment] | None,
    place_of: Callable[[Line], EpisodePosition],
    max_tokens: int,
    tools: ToolSources | None = None,
) -> Iterator[tuple[Line, JournalDifference | None]]:
    """Play episodes again, and compare them with their lines.

    An episode that was ended from outside, as by a time limit, is played up to there; one that a program led, not at
    all. One in which another policy was to act next is played up to there, too.

    Args:
        lines: Lines of the journal.
        config: The recipe's `environment` section.
        open_world: Function that makes the environment of an episode; None to take its answers from the journal.
        place_of: Function that says what was to be played in a line's episode.
        max_tokens: Most tokens of a conversation, from its beginning.
        tools: Tools of the run, of which only the environment's are called; None for none.

    Yields:
        Each line, with the first difference if there is one.

    Raises:
        ValueError: A line is damaged, or a program leads the episodes and is not to be used.
    """
    once, is_program = config.model_copy(update={"max_attempts": 1}), program_maker(config) is not None
    if is_program and open_world is None:
        raise ValueError("a program leads the episodes, and has no answers in the journal: play them with the program")

    async def play(line: Line) -> JournalDifference | None:
        episode = episode_of(line)

        def opened() -> GuardedEnvironment | ProgramEnvironment:
            world = None if open_world is None else open_world()
            return world if isinstance(world, ProgramEnvironment) else JournalEnvironment(episode, world)

        async def open_tools(world: GuardedEnvironment) -> Toolbox:
            assert tools is not None
            kinds = FunctionTool | EnvironmentTool
            found = [] if open_world is None else [tool for tool in tools.tools if isinstance(tool, kinds)]
            own = [await world.bind(tool) for tool in found if tool.home is not None and tool.home.is_environment]
            return JournalToolbox(own, tools, config, episode)

        if is_program and episode.cause in FROM_OUTSIDE:
            return None
        scheduler = JournalScheduler(episode.trace.said())
        player = EpisodePlayer(once, opened, max_tokens, scheduler, None if tools is None else open_tools)
        try:
            return first_difference(line, line_of(await player.play(up_to_others(place_of(line), episode))))
        finally:
            await player.close()

    async def play_some(some: Sequence[Line]) -> list[JournalDifference | None]:
        return await asyncio.gather(*map(play, some))

    for begin in range(0, len(lines), config.concurrency):
        some = lines[begin : begin + config.concurrency]
        yield from zip(some, run_to_end(play_some(some)), strict=True)


def up_to_others(place: EpisodePosition, episode: Episode) -> EpisodePosition:
    """Plan of an episode, which may have been left where an agent of another policy was to act."""
    last = episode.answers[-1].turn if episode.answers else None
    if episode.cause or episode.is_cut or last is None or last.done:
        return place
    said = ((node, node.parent, node.said) for node in episode.trace.said())
    history = [Spoken(parent.context(), node.tokens, facts) for node, parent, facts in said if parent and facts]
    return replace(place, agents=frozenset(), history=history)
