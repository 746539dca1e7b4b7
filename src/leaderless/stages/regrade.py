"""Grades episodes of a journal again, as the stage `reward` would with other rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.episode import TraceSample
from leaderless.environments.journal import Line, episode_of
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import RewardInput
from leaderless.stages.episode_samples import common_beginning
from leaderless.stages.reward import group_of, joined, last_said, reward_inputs, transcripts, with_environment


@dataclass(frozen=True)
class RegradedPart:
    """Part of an agent in an episode: the unit that has a reward.

    Attributes:
        number: Number of the episode.
        actor: Place of the agent among the environment's agents.
        is_sampled: Whether it counts in metrics; a greedy episode is only a baseline.
        asked: Input of the rewards; None if the episode has failed.
        value: Sum of the environment's rewards.
        failure: Reason why the episode has failed; None if it has not.
    """

    number: int
    actor: int
    is_sampled: bool
    asked: RewardInput | None
    value: float
    failure: Json


def parts_of(lines: Sequence[Line], recipe: Recipe, tokenizer: Tokenizer) -> list[RegradedPart]:
    """The parts of episodes, in the order of the lines, which have all parts of each group.

    Raises:
        ValueError: A line is damaged.
    """
    groups: dict[Json, list[Line]] = {}
    for line in lines:
        groups.setdefault(line["group_id"], []).append(line)
    return [part for group in groups.values() for part in _parts_of_group(group, recipe, tokenizer)]


def regrade(parts: Sequence[RegradedPart], recipe: Recipe, pool: RewardPool) -> list[Graded]:
    """Rewards of the parts by a pool.

    Args:
        parts: Parts of episodes.
        recipe: The recipe, whose `reward` section the pool computes.
        pool: Rewards.
    """
    found: dict[int, Graded] = {}
    if recipe.reward.options():
        whole = [(place, part.asked) for place, part in enumerate(parts) if part.asked is not None]
        asked = [one for _, one in whole]
        graded = pool.grade(asked, [recipe.data.source_of(one.row) for one in asked])
        found = {place: one for (place, _), one in zip(whole, graded, strict=True)}
    return [with_environment(found.get(place), part.value, part.failure) for place, part in enumerate(parts)]


def _parts_of_group(lines: Sequence[Line], recipe: Recipe, tokenizer: Tokenizer) -> Iterator[RegradedPart]:
    episodes = [episode_of(line) for line in lines]
    samples = [[] if episode.cause else episode.trace.samples() for episode in episodes]
    heads = [sample.tokens[: sample.head_length] for some in samples for sample in some]
    head = len(common_beginning(heads)) if heads else 0
    for line, episode, some in zip(lines, episodes, samples, strict=True):
        number, is_sampled = int(str(line["id"])), line["temperature"] != 0
        if episode.cause:
            failure: Json = {"cause": episode.cause, "error": episode.error}
            yield RegradedPart(number, 0, is_sampled, None, 0.0, failure)
        by_agent: dict[str, list[TraceSample]] = {}
        for sample in some:
            by_agent.setdefault(sample.agent, []).append(sample)
        for agent in sorted(by_agent, key=episode.agents.index):
            said = (node.said for node in episode.trace.said())
            value = float(np.float32(sum(one.reward for one in said if one and one.agent == agent)))
            actor = episode.agents.index(agent)
            asked = _input_of(line, by_agent[agent], head, actor, recipe, tokenizer, is_cut=episode.is_cut)
            yield RegradedPart(number, actor, is_sampled, asked, value, None)


def _input_of(
    line: Line,
    samples: Sequence[TraceSample],
    head: int,
    actor: int,
    recipe: Recipe,
    tokenizer: Tokenizer,
    *,
    is_cut: bool,
) -> RewardInput:
    row = line["task"]
    assert isinstance(row, Mapping)
    tokens, masks = [one.tokens[head:] for one in samples], [one.is_trained[head:] for one in samples]
    texts, count = transcripts(tokenizer, tokens, recipe, masks), len(samples)
    cut = [is_cut or one.is_truncated for one in samples]
    groups = [group_of(int(str(line["group_id"])), actor)] * count
    inputs = reward_inputs([recipe.data.train_set_of(row)] * count, [row] * count, texts, cut, groups)
    return joined([last_said(one) for one in inputs], recipe)
