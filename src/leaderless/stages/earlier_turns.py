"""Episodes that other roles have begun, as they are found in their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from leaderless.data.batch import SIBLING_BITS, Batch
from leaderless.environments.episode import Said, Spoken


class EpisodeIndex(NamedTuple):
    """Where an episode belongs: a task, a place among its episodes, and the sibling number of its first sample."""

    task: int
    place: int
    begin: int


@dataclass(frozen=True)
class EarlierTurns:
    """An episode that others have begun.

    Attributes:
        seat: Place that it belongs to.
        history: Messages of the other agents, in the order of the turns.
        failure: Cause and error, if it has failed.
    """

    seat: EpisodeIndex
    history: Sequence[Spoken]
    failure: tuple[str, str] | None


def earlier_episodes(batch: Batch, agents: Sequence[str], num_places: int) -> list[EarlierTurns]:
    """The episodes that samples are from, in the order of their ids.

    Args:
        batch: Samples with the columns of a rollout in an environment; all samples of an episode are here.
        agents: Names of the environment's agents.
        num_places: Places that each node has for the episodes of a task.
    """
    assert batch.prompt_index is not None
    spoken: dict[int, list[Spoken]] = {}
    failures: dict[int, tuple[str, str] | None] = {}
    task_of: dict[int, int] = {}
    for row, play in enumerate(batch.dense("joint_ids").tolist()):
        failure = batch.objects("environment_failed")[row]
        failures[play] = (str(failure["cause"]), str(failure["error"])) if isinstance(failure, Mapping) else None
        task_of[play] = int(batch.prompt_index[row])
        spoken.setdefault(play, [])
    for play, one in _spoken(batch, agents):
        spoken[play].append(one)
    found: list[EarlierTurns] = []
    for play in sorted(spoken):
        begin = play & ((1 << SIBLING_BITS) - 1)
        history = sorted(spoken[play], key=lambda one: one.said.turn)
        found.append(EarlierTurns(EpisodeIndex(task_of[play], begin % num_places, begin), history, failures[play]))
    return found


def _spoken(batch: Batch, agents: Sequence[str]) -> Iterator[tuple[int, Spoken]]:
    """Messages of each sample, with the episode that they are from."""
    lists = {
        name: batch.jagged(name).to_lists()
        for name in ("tokens", "response_mask", "turns", "rollout_log_probs", "policy_versions", "temperatures")
    }
    prompts, plays = batch.jagged("prompt_tokens").to_lists(), batch.dense("joint_ids").tolist()
    actors, truncated = batch.dense("actor").tolist(), batch.dense("truncated").tolist()
    for row, play in enumerate(plays):
        places = [place for place, is_sampled in enumerate(lists["response_mask"][row]) if is_sampled]
        turns = lists["turns"][row]
        for turn, group in groupby(range(len(places)), key=lambda number: turns[number]):
            numbers = list(group)
            tokens, begin, end = lists["tokens"][row], places[numbers[0]], places[numbers[-1]] + 1
            said = Said(
                log_probs=[lists["rollout_log_probs"][row][number] for number in numbers],
                policy_versions=[int(lists["policy_versions"][row][number]) for number in numbers],
                turn=int(turn),
                agent=agents[actors[row]],
                is_truncated=truncated[row] and numbers[-1] == len(places) - 1,
                temperature=lists["temperatures"][row][numbers[0]],
            )
            yield play, Spoken([*prompts[row], *tokens[:begin]], tokens[begin:end], said)
