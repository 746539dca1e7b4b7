"""The stage that computes rewards, and the same for episodes of a journal, with other rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig
from leaderless.config.recipe import Product
from leaderless.data.batch import Batch, Column
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.episode import TraceSample
from leaderless.environments.journal import Line, episode_of, text_of
from leaderless.planner.workflow.reward_stages import ENVIRONMENT, SUCCESS, judge_metrics
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import Passage, RewardInput
from leaderless.rollout.engine import Completion
from leaderless.stages.context import StageContext
from leaderless.stages.episode_samples import common_beginning
from leaderless.stages.episodes import Episodes

_ACTOR_BITS = 16
"""Room for the agents of an environment."""


class Shown(NamedTuple):
    """The text that rewards are shown of an episode.

    Attributes:
        has_text: Whether the policy writes any.
        is_cut: Whether it is shown without the stop text that ended it, and what follows.
        is_last: Whether the response is the policy's last message, and not all that it has sampled.
    """

    has_text: bool = True
    is_cut: bool = True
    is_last: bool = False


# Stop texts may tell an environment what the policy wants.
_CONVERSATION = Shown(is_cut=False, is_last=True)
SHOWN: Mapping[Product, Shown] = {
    "text": Shown(),
    "episodes": _CONVERSATION,
    "online": _CONVERSATION,
    "bodies": Shown(has_text=False),
}
"""The text of each kind of run."""


def reward(batch: Batch, context: StageContext) -> Batch:
    """Grade each episode once, by the recipe's rewards that apply to its source; all of its samples get the result."""
    episodes, inputs = Episodes.of(batch), inputs_of(batch, context)
    inputs = [joined([inputs[sample] for sample in samples], context.recipe) for samples in episodes.samples()]
    sources = [context.recipe.data.source_of(one.row) for one in inputs]
    if "environment_rewards" in batch:
        graded = _with_environment(inputs, sources, episodes.rows, context)
    else:
        graded = context.grade(inputs, sources)
    rewards = torch.tensor([g.value for g in graded], dtype=torch.float32)
    is_valid = torch.tensor([g.is_valid for g in graded], dtype=torch.bool)
    _report(context, graded, rewards, is_sampled(episodes.rows))
    stands_for_shard = context.node.layout.represents(context.process_group.rank)
    if context.episodes is not None and "joint_ids" in batch and stands_for_shard:
        context.episodes.write("step", context.step, "graded", partial(grades, episodes.rows, graded))
        broken = [one.is_broken for one in graded]
        if context.recipe.defers_grades and any(broken):
            late = episodes.rows.select(torch.tensor(broken)), [one for one in graded if one.is_broken]
            context.episodes.write("step", context.step, "deferred", partial(grades, *late))
    columns: dict[str, Column] = {
        "rewards": rewards,
        "reward_valid": is_valid,
        "reward_details": tuple(dict(g.details) for g in graded),
    }
    return batch.with_columns({name: episodes.of_samples(column) for name, column in columns.items()})


def _with_environment(
    inputs: Sequence[RewardInput], sources: Sequence[str | None], episodes: Batch, context: StageContext
) -> list[Graded]:
    """Rewards of episodes: the rewards of the environment, and the recipe's; a failed one is not graded."""
    values, failures = episodes.dense("environment_rewards").tolist(), episodes.objects("environment_failed")
    whole = [place for place, failure in enumerate(failures) if failure is None]
    graded = [with_environment(None, value, failure) for value, failure in zip(values, failures, strict=True)]
    if SUCCESS in episodes:
        done = episodes.dense(SUCCESS).tolist()
        graded = [with_success(one, is_done=is_done) for one, is_done in zip(graded, done, strict=True)]
    if context.recipe.reward.options():
        found = context.grade([inputs[place] for place in whole], [sources[place] for place in whole])
        for place, one in zip(whole, found, strict=True):
            graded[place] = with_environment(one, values[place], None)
        context.metrics.mean("episode/grading_s", sum(one.seconds for one in found), len(found))
        own = is_sampled(episodes)
        broken = torch.tensor([one.is_broken for one in graded], dtype=torch.bool)
        context.metrics.mean("failure/grader", int((broken & own).sum()), int(own.sum()))
        error = next((one.first_error for one in graded if one.is_broken), None)
        if error is not None:
            context.run_directory.note_failure(context.step, context.process_group.rank, "grader", error)
    return graded


def grades(episodes: Batch, graded: Sequence[Graded]) -> Iterator[str]:
    """Rewards of episodes, as lines of their journal, by the number of the play and of the agent."""
    numbers, actors = episodes.dense("joint_ids").tolist(), episodes.dense("actor").tolist()
    for number, actor, one in zip(numbers, actors, graded, strict=True):
        yield text_of(grade_of(number, actor, one))


def grade_of(number: int, actor: int, graded: Graded) -> dict[str, Json]:
    """Reward of an agent's part of an episode, as a line of the journal."""
    worth: dict[str, Json] = {"reward": graded.value, "is_valid": graded.is_valid, "details": dict(graded.details)}
    return {"id": number, "actor": actor, **worth, "seconds": round(graded.seconds, 6)}


def with_environment(graded: Graded | None, value: float, failure: Json) -> Graded:
    """Reward of an episode, from the recipe's rewards, if there are any, and the sum of its environment's rewards.

    A failed episode is worth nothing, and not 0; `failure` says why it failed.
    """
    if isinstance(failure, Mapping):
        return Graded(0.0, is_valid=False, details={ENVIRONMENT: {"error": failure["error"]}})
    details: dict[str, Json] = {ENVIRONMENT: {"value": value}}
    if graded is None:
        return Graded(value, is_valid=True, details=details)
    total = graded.value + value if graded.is_valid else 0.0
    return replace(graded, value=total, details={**graded.details, **details})


def with_success(graded: Graded, *, is_done: bool) -> Graded:
    """Reward of a body's episode, with the fact whether it has done its task."""
    if not graded.is_valid:
        return graded
    return replace(graded, details={**graded.details, SUCCESS: {"value": float(is_done)}})


def inputs_of(batch: Batch, context: StageContext) -> list[RewardInput]:
    """The inputs of rewards for samples of training data, each on its own."""
    rows = [row for row in batch.objects("rows") if isinstance(row, Mapping)]
    masks = batch.jagged("response_mask").to_lists() if "response_mask" in batch else None
    texts = transcripts(context.tokenizer, batch.jagged("tokens").to_lists(), context.recipe, masks)
    configs = [context.recipe.data.train_set_of(row) for row in rows]
    # As `group_of` numbers them.
    groups = (batch.group_ids << _ACTOR_BITS | (batch.dense("actor") if "actor" in batch else 0)).tolist()
    is_last = SHOWN[context.recipe.product].is_last
    return reward_inputs(configs, rows, texts, batch.dense("truncated").tolist(), groups, is_last=is_last)


def inputs_of_group(
    prompt: Batch, responses: Sequence[Completion], recipe: Recipe, tokenizer: Tokenizer
) -> list[tuple[RewardInput, str | None]]:
    """The inputs for the responses to a prompt, a batch of one row, each with its source."""
    (row,) = prompt.objects("rows")
    assert isinstance(row, Mapping)
    texts = transcripts(tokenizer, [one.tokens for one in responses], recipe)
    sets, cut = [recipe.data.train_set_of(row)] * len(texts), [one.is_truncated for one in responses]
    source = recipe.data.source_of(row)
    groups = [group_of(int(prompt.ids))] * len(texts)
    return [(one, source) for one in reward_inputs(sets, [row] * len(texts), texts, cut, groups)]


def group_of(number: int, actor: int = 0) -> int:
    """The number that rewards know a group by; the agents of an environment have groups of their own.

    Args:
        number: Number of the group.
        actor: Place of the agent among the environment's agents.
    """
    return number << _ACTOR_BITS | actor


def joined(samples: Sequence[RewardInput], recipe: Recipe) -> RewardInput:
    """The input for an episode: what the policy sampled in all of its samples, and the transcript of the last.

    In an environment the response is the last message.
    """
    if len(samples) == 1:
        return samples[0]
    parts = samples[-1:] if SHOWN[recipe.product].is_last else samples
    response, is_truncated = "".join(one.response for one in parts), any(one.is_truncated for one in samples)
    return replace(samples[-1], response=response, is_truncated=is_truncated)


def is_sampled(batch: Batch) -> Tensor:
    """[n] bool: responses that are in metrics; not the greedy ones, which are only baselines."""
    return ~batch.dense("is_greedy") if "is_greedy" in batch else torch.ones(len(batch), dtype=torch.bool)


def _report(context: StageContext, graded: Sequence[Graded], rewards: Tensor, is_reported: Tensor) -> None:
    is_valid = torch.tensor([g.is_valid for g in graded], dtype=torch.bool)
    context.metrics.spread("reward", rewards[is_valid & is_reported])
    context.metrics.total("reward/failed", int((~is_valid).sum()))
    errors = ((name, error) for g in graded for name in g.details if (error := reward_error(g.details, name)))
    for name, error in islice(errors, 1):
        context.run_directory.note_reward_error(context.step, context.process_group.rank, name, error)
    details = [g.details for g, is_kept in zip(graded, is_reported.tolist(), strict=True) if is_kept]
    for name in context.recipe.reward_names:
        values = [value for detail in details if (value := reward_value(detail, name)) is not None]
        context.metrics.mean(f"reward/{name}", sum(values), len(values))
    if context.recipe.reward.judges():
        _report_judges(context, graded)


def _report_judges(context: StageContext, graded: Sequence[Graded]) -> None:
    """Report what it took to ask judges. Questions without an answer count, but for their seconds."""
    asked = [one for g in graded for one in g.asked.values()]
    failed = sum(bool(reward_error(g.details, name)) for g in graded for name in g.asked)
    questions, cached = sum(one.questions for one in asked), sum(one.cached for one in asked)
    pairs = sum(one.pairs for one in asked)
    found = {
        "failed_share": (failed, len(asked)),
        "cached_share": (cached, questions),
        "requests": (sum(one.requests for one in asked), questions - cached),
        "latency_s": (sum(one.seconds for one in asked), questions - cached),
        "contradictions": (sum(one.contradictions for one in asked), pairs),
    }
    for name in judge_metrics(context.recipe.reward):
        context.metrics.mean(f"judge/{name}", *found[name])


def reward_value(details: Mapping[str, Json], name: str) -> float | None:
    """The value of one reward of a sample, before weighting; None if it failed or does not apply."""
    outcome = details.get(name)
    value = outcome.get("value") if isinstance(outcome, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def reward_error(details: Mapping[str, Json], name: str) -> str:
    """The error of one reward of a sample; empty where it did not fail."""
    outcome = details.get(name)
    error = outcome.get("error") if isinstance(outcome, Mapping) else None
    return error if isinstance(error, str) else ""


def reward_inputs(
    configs: Sequence[DatasetConfig],
    rows: Sequence[Mapping[str, Json]],
    texts: Sequence[tuple[Passage, ...]],
    truncated: Sequence[bool],
    groups: Sequence[int],
    *,
    is_last: bool = False,
) -> list[RewardInput]:
    """The inputs of rewards for some responses; the response of a transcript is what the policy sampled.

    Args:
        configs: Dataset of each.
        rows: Row of each.
        texts: Transcript of each.
        truncated: Whether each was cut.
        groups: Number of the group of each, by `group_of`.
        is_last: Whether the response is the policy's last message.
    """
    return [
        RewardInput(
            prompt=row.get(config.prompt),
            response=response_in(text, is_last=is_last),
            answer=row[config.answer] if config.answer else None,
            row=row,
            is_truncated=is_truncated,
            transcript=text,
            group=group,
        )
        for config, row, text, is_truncated, group in zip(configs, rows, texts, truncated, groups, strict=True)
    ]


def response_in(transcript: Sequence[Passage], *, is_last: bool = False) -> str:
    """The text that the policy sampled, without what others wrote in between, or the last of its messages."""
    said = [passage.text for passage in transcript if passage.is_sampled]
    return "".join(said[-1:] if is_last else said)


def transcripts(
    tokenizer: Tokenizer,
    rows: Sequence[Sequence[int]],
    recipe: Recipe,
    masks: Sequence[Sequence[int]] | None = None,
) -> list[tuple[Passage, ...]]:
    """Tokens as text by whoever wrote it, without special tokens, and as `SHOWN` says.

    The masks say of each token whether the policy sampled it; None if it sampled all.
    """
    shown = SHOWN[recipe.product]
    if not shown.has_text:
        return [() for _ in rows]
    stops = recipe.rollout.stop if shown.is_cut else ()

    def decode(tokens: Sequence[int], *, is_response: bool) -> Passage:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in stops if is_response else ():
            text = text.partition(stop)[0]
        return Passage(text, is_response)

    if masks is None:
        return [(decode(tokens, is_response=True),) for tokens in rows]
    return [
        tuple(
            decode([token for token, _ in run], is_response=bool(is_sampled))
            for is_sampled, run in groupby(zip(tokens, mask, strict=True), key=itemgetter(1))
        )
        for tokens, mask in zip(rows, masks, strict=True)
    ]


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
    sets = [recipe.data.train_set_of(row)] * count
    return joined(reward_inputs(sets, [row] * count, texts, cut, groups, is_last=True), recipe)
