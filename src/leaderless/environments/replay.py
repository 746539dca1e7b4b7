"""Plays episodes of a journal again, without a model, and finds the first difference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.deadlines import run_to_end
from leaderless.environments.episode import Episode, EpisodePosition, Spoken
from leaderless.environments.guarded_environment import CRASH, TIMEOUT, GuardedEnvironment
from leaderless.environments.journal import Line, episode_of, line_of
from leaderless.environments.journal_difference import JournalDifference, first_difference
from leaderless.environments.player import EpisodePlayer
from leaderless.environments.programs.program_environment import ProgramEnvironment
from leaderless.environments.programs.registry import program_maker
from leaderless.environments.replay_stubs import JournalEnvironment, JournalScheduler, JournalTools, UpToFailure
from leaderless.environments.tools.use import ToolUse


def replay(
    lines: Sequence[Line],
    config: EnvironmentConfig,
    open_world: Callable[[], GuardedEnvironment | ProgramEnvironment] | None,
    place_of: Callable[[Line], EpisodePosition],
    max_tokens: int,
    tools: ToolUse | None = None,
) -> Iterator[tuple[Line, JournalDifference | None]]:
    """Play episodes again, and compare them with their lines.

    An episode that was ended by a time limit or a crash is played up to there; one that a program led, not at all. One
    in which another policy was to act next is played up to there, too.

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
            world = JournalEnvironment(episode) if open_world is None else open_world()
            return world if isinstance(world, ProgramEnvironment) else UpToFailure(world, episode)

        if is_program and episode.cause in {TIMEOUT, CRASH}:
            return None
        known = None
        if tools is not None:
            known = JournalTools(
                tools.sources,
                tools.reader,
                tools.schemas,
                episode=episode,
                max_result_characters=config.max_result_characters,
                has_environment=open_world is not None,
            )
        player = EpisodePlayer(once, opened, max_tokens, JournalScheduler(episode.trace.said()), known)
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
