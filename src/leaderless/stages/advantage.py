"""The stages that turn rewards into advantages, or drop groups that would have none."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless import algorithms
from leaderless.algorithms import AdvantageInputs, Groups, repeat_per_token
from leaderless.algorithms.advantage import compute
from leaderless.base.values import Json
from leaderless.data.batch import Batch, Column, Jagged
from leaderless.planner.workflow.reward_stages import ENVIRONMENT
from leaderless.stages.context import StageContext
from leaderless.stages.episodes import Episodes
from leaderless.stages.mini_batches import adapt_kl_coefficient, counted_samples, kl_coefficient
from leaderless.stages.reward import is_sampled


def advantage(batch: Batch, context: StageContext) -> Batch:
    """Compute the recipe's advantage of every sampled token, and what else it writes, such as returns for a critic."""
    return _reported(_with_advantages(batch, context), context)


def remax(batch: Batch, context: StageContext) -> Batch:
    """Compute an advantage over the greedy response to the same prompt, then drop the greedy response."""
    return _reported(_with_advantages(batch, context).select(~batch.dense("is_greedy")), context)


def dynamic_sampling(batch: Batch, context: StageContext) -> Batch:
    """Keep the groups with a signal: at least two valid rewards, and not all the same.

    Source: DAPO, arXiv 2503.14476, section 3.2, equation 11, which keeps prompts that some but not all responses answer
    correctly. Here the raw rewards are compared, before any shaping, so that graded rewards work too; a dropped group
    counts as all right if its rewards are above 0.
    """
    episodes = Episodes.of(batch)
    rewards, is_valid = (episodes.rows.dense(name) for name in ("rewards", "reward_valid"))
    groups = Groups.of(rewards, is_valid, episodes.rows.group_ids)
    is_silent, is_right = (groups.count >= 2) & ~groups.has_signal, groups.mean > 0
    for name, counted in {
        "kept": groups.has_signal,
        "dropped_all_right": is_silent & is_right,
        "dropped_all_wrong": is_silent & ~is_right,
        "dropped_failed": groups.count < 2,
    }.items():
        context.metrics.total(f"sampling/{name}", counted.sum())
    is_kept = episodes.of_samples(groups.has_signal[groups.index])
    assert isinstance(is_kept, Tensor)
    return batch.select(is_kept)


def _shaped_rewards(batch: Batch, context: StageContext) -> tuple[Tensor, Tensor]:
    """Rewards with the penalty for length, [n], and the KL penalty of each token, [total]; 0 for failed rows."""
    algorithm, lengths = context.recipe.algorithm, batch.dense("response_lengths")
    is_valid = batch.dense("reward_valid")
    is_reported = is_valid & is_sampled(batch)
    rewards = torch.where(is_valid, batch.dense("rewards"), 0.0)
    if buffer := algorithm.overlong.buffer_tokens:
        longest = context.recipe.rollout.max_response_tokens
        penalty = algorithms.overlong_penalty(_longest_messages(batch), max_tokens=longest, buffer_tokens=buffer)
        context.metrics.mean("reward/overlong_penalty", penalty[is_reported].sum(), is_reported.sum())
        rewards = torch.where(is_valid, rewards + penalty, 0.0)
    if not algorithm.is_penalized_in_reward:
        return rewards, torch.zeros(int(lengths.sum()))
    old, reference = batch.jagged("old_log_probs").values, batch.jagged("ref_log_probs").values
    divergence = algorithms.kl_penalty(old, reference, algorithm.kl.estimator)
    divergence = torch.where(repeat_per_token(is_valid, lengths), divergence, 0.0)
    coefficient = kl_coefficient(context)
    reported = divergence[repeat_per_token(is_reported, lengths)]
    context.metrics.mean("reward/kl", reported.sum(), len(reported))
    adapt_kl_coefficient(context, reported.sum(), len(reported), int(is_reported.sum()))
    return rewards, coefficient * divergence


def _longest_messages(rows: Batch) -> Tensor:
    """[n] int64: sampled tokens of the longest message of each episode, as the limit on a response is one on each."""
    lengths = rows.dense("response_lengths")
    if "turns" not in rows:
        return lengths
    episode = repeat_per_token(torch.arange(len(lengths)), lengths)
    messages = torch.stack([episode, rows.jagged("turns").values.long()], dim=1)
    of, counts = torch.unique_consecutive(messages, dim=0, return_counts=True)
    return torch.zeros_like(lengths).scatter_reduce(0, of[:, 0], counts, "amax")


def _with_advantages(batch: Batch, context: StageContext) -> Batch:
    """The samples with the advantages of their episodes: where a formula speaks of a response, it gets an episode."""
    recipe = context.recipe
    config, episodes = recipe.algorithm.advantage, Episodes.of(batch)
    rows = episodes.rows
    lengths, is_valid = rows.dense("response_lengths"), rows.dense("reward_valid")
    rewards, penalties = _shaped_rewards(rows, context)
    if "turn_rewards" in rows:
        # A reward of a turn comes at its last token, and is not waited for until the end of the episode.
        at_turns = rows.jagged("turn_rewards").values
        rewards, penalties = rewards - algorithms.segment_sum(at_turns, lengths), penalties - at_turns
    # By the names in the details of a reward: the recipe's rewards, the environment's, and those of reward models.
    weights = dict.fromkeys(recipe.models, recipe.algorithm.reward_model.weight)
    weights |= {name: options.weight for name, options in recipe.reward.options().items()} | {ENVIRONMENT: 1.0}
    inputs = AdvantageInputs(
        rewards=rewards - algorithms.segment_sum(penalties, lengths),
        final_rewards=rewards,
        penalties=penalties,
        is_valid=is_valid,
        is_trained=counted_samples(rows, context),
        lengths=lengths,
        group_ids=rows.group_ids,
        episode_ids=rows.ids,
        columns={name: _plain(rows[name]) for name in config.reads},
        sum_over_ranks=context.sum,
        gather_over_ranks=context.gather,
        step=context.step,
        state=context.state,
        reward_weights=weights,
    )
    output = compute(config, inputs)
    is_counted = repeat_per_token(is_valid, lengths) if config.is_per_token else is_valid
    for name, values in output.metrics.items():
        context.metrics.mean(name, values[is_counted].sum(), is_counted.sum())
    advantages = output.advantages if config.is_per_token else repeat_per_token(output.advantages, lengths)
    columns = {**output.columns, "advantages": advantages}
    return batch.with_columns(
        {name: episodes.of_samples(Jagged(values, lengths, "response_tokens")) for name, values in columns.items()}
    )


def _reported(batch: Batch, context: StageContext) -> Batch:
    size = algorithms.segment_sum(batch.jagged("advantages").values.abs(), batch.dense("response_lengths"))
    silent, groups = algorithms.count_groups_without_signal(size, batch.group_ids)
    context.metrics.mean("group/no_signal", silent, groups)
    return batch


def _plain(column: Column) -> Tensor | tuple[Tensor, ...] | tuple[Json, ...]:
    """A column as an advantage gets it."""
    if not isinstance(column, Jagged):
        return column
    return column.values if column.axis == "response_tokens" else column.rows()
