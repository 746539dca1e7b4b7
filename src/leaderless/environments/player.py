"""Plays episodes: many at the same time, each with deadlines and limits of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.engine_scheduler import EngineScheduler, SharedEngineScheduler
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.episode_runner import EpisodeRunner, OpenTools
from leaderless.environments.guarded_environment import GuardedEnvironment
from leaderless.environments.programs.program_environment import LazyEndpoint, ProgramEnvironment
from leaderless.environments.tools.sources import ToolSources
from leaderless.environments.user_functions import run_to_end, until_stuck
from leaderless.observability.clock import Clock
from leaderless.rollout.engine import RolloutEngine


class EpisodePlayer:
    """Plays episodes in an environment."""

    def __init__(
        self,
        config: EnvironmentConfig,
        open_world: Callable[[], GuardedEnvironment | ProgramEnvironment],
        max_tokens: int,
        pump: EngineScheduler,
        open_tools: OpenTools | None = None,
    ) -> None:
        """Play nothing yet; a conversation has at most `max_tokens`, from its beginning."""
        self._config, self._open_world, self._max_tokens, self._pump = config, open_world, max_tokens, pump
        self._open_tools, self._doorway = open_tools, LazyEndpoint()

    async def play(self, place: EpisodePosition) -> Episode:
        """Play an episode, again if it fails in a way that is to be retried."""
        episode, retried = Episode(), self._config.failures.kinds_with("retried")
        for attempt in range(self._config.max_attempts):
            one = EpisodeRunner(self._config, self._max_tokens, self._pump, self._doorway, place, attempt)
            try:
                found = await until_stuck(one.run(self._open_world, self._open_tools))
            except TimeoutError as error:
                found = one.leave(str(error))
            found.failures[:0] = episode.failures  # of earlier attempts
            episode = found
            if episode.cause not in retried:
                break
        return episode

    async def close(self) -> None:
        """Answer no programs any more."""
        await self._doorway.close()


def play_all(
    engine: RolloutEngine,
    config: EnvironmentConfig,
    open_world: Callable[[], GuardedEnvironment | ProgramEnvironment],
    places: Sequence[EpisodePosition],
    max_tokens: int,
    progress: Callable[[int], None],
    tools: ToolSources | None = None,
    clock: Clock | None = None,
) -> tuple[list[Episode], SharedEngineScheduler]:
    """Play episodes with an engine that is awake and has weights, at most `config.concurrency` at a time.

    Args:
        engine: Engine that samples.
        config: The recipe's `environment` section.
        open_world: Function that makes the environment of an episode.
        places: The episodes.
        max_tokens: Most tokens of a conversation, from its beginning.
        progress: Function that gets the number of episodes that have ended since its last call, also 0.
        tools: Tools that the policy may call; None for none.
        clock: Clock of the thread: the time in which the engine does not work belongs to the environment.

    Returns:
        The episodes in the order of their places, and the pump with what it has measured.
    """

    async def play() -> tuple[list[Episode], SharedEngineScheduler]:
        pump = SharedEngineScheduler(engine, lambda: progress(0), clock)
        player = EpisodePlayer(config, open_world, max_tokens, pump, None if tools is None else tools.open)
        free = asyncio.Semaphore(config.concurrency)

        async def one(place: EpisodePosition) -> Episode:
            async with free:
                episode = await player.play(place)
            progress(1)
            return episode

        try:
            async with asyncio.TaskGroup() as tasks:
                engine_task = tasks.create_task(pump.run())
                playing = [tasks.create_task(one(place)) for place in places]
                await asyncio.gather(*playing)
                engine_task.cancel()
        finally:
            await player.close()
        return [task.result() for task in playing], pump

    try:
        with clock.doing("environment") if clock is not None else nullcontext():
            return run_to_end(play())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group
