"""The stage that turns rewards into advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.algorithms import (
    Groups,
    Moments,
    count_groups,
    count_groups_without_signal,
    cpgd_advantages,
    distillation_advantages,
    gae_advantages,
    gpg_advantages,
    grpo_advantages,
    kl_penalty,
    opo_advantages,
    overlong_penalty,
    pass_at_k_advantages,
    reinforce_advantages,
    rejection_advantages,
    remax_advantages,
    repeat_per_token,
    rloo_advantages,
    segment_sum,
    token_level_rewards,
    whiten,
)
from leaderless.config.algorithm import (
    TOKEN_ADVANTAGES,
    CpgdAdvantage,
    DistillationAdvantage,
    FunctionAdvantage,
    GaeAdvantage,
    GpgAdvantage,
    GrpoAdvantage,
    OpoAdvantage,
    PassAtKAdvantage,
    ReinforceAdvantage,
    RejectionAdvantage,
    RlooAdvantage,
)
from leaderless.config.functions import load_function
from leaderless.data.batch import Batch, Jagged
from leaderless.stages.context import StageContext
from leaderless.stages.kl import adapt_coefficient, coefficient_of
from leaderless.stages.mini_batches import counted_samples
from leaderless.stages.reward import is_sampled


def advantage(batch: Batch, context: StageContext) -> Batch:
    """Compute the recipe's advantage of every sampled token, and the returns for a critic."""
    lengths = batch.dense("response_lengths")
    rewards, penalties = _shaped_rewards(batch, context)
    if context.recipe.algorithm.advantage.type in TOKEN_ADVANTAGES:
        columns = _token_advantages(batch, rewards, penalties, context)
    else:
        totals = rewards - segment_sum(penalties, lengths)
        advantages = _sample_advantages(totals, batch, context)
        columns = {"advantages": repeat_per_token(advantages, lengths)}
    _report(context, columns["advantages"], batch)
    return batch.with_columns({name: Jagged(values, lengths, "response_tokens") for name, values in columns.items()})


def remax(batch: Batch, context: StageContext) -> Batch:
    """Subtract the reward of the greedy response to the same prompt from the others', then drop the greedy response."""
    is_greedy, is_valid = batch.dense("is_greedy"), batch.dense("reward_valid")
    rewards, penalties = _shaped_rewards(batch, context)
    totals = rewards - segment_sum(penalties, batch.dense("response_lengths"))
    order = torch.argsort(batch.group_ids[is_greedy])
    place = order[torch.searchsorted(batch.group_ids[is_greedy][order], batch.group_ids)]
    advantages = remax_advantages(totals, is_valid, totals[is_greedy][place], is_valid[is_greedy][place])
    kept = batch.with_columns(advantages=advantages).select(~is_greedy)
    lengths = kept.dense("response_lengths")
    values = repeat_per_token(kept.dense("advantages"), lengths)
    kept = kept.with_columns(advantages=Jagged(values, lengths, "response_tokens"))
    _report(context, values, kept)
    return kept


def _shaped_rewards(batch: Batch, context: StageContext) -> tuple[Tensor, Tensor]:
    """Rewards with the penalty for length, [n], and the KL penalty of each token, [total]; 0 for failed rows."""
    algorithm, lengths = context.recipe.algorithm, batch.dense("response_lengths")
    is_valid = batch.dense("reward_valid")
    is_reported = is_valid & is_sampled(batch)
    rewards = torch.where(is_valid, batch.dense("rewards"), 0.0)
    if algorithm.overlong.buffer_tokens:
        longest = context.recipe.rollout.max_response_tokens
        penalty = overlong_penalty(lengths, max_tokens=longest, buffer_tokens=algorithm.overlong.buffer_tokens)
        context.metrics.mean("reward/overlong_penalty", penalty[is_reported].sum(), is_reported.sum())
        rewards = torch.where(is_valid, rewards + penalty, 0.0)
    if algorithm.kl.place == "loss" or not algorithm.uses_reference:
        return rewards, torch.zeros(int(lengths.sum()))
    old, reference = batch.jagged("old_log_probs").values, batch.jagged("ref_log_probs").values
    divergence = torch.where(
        repeat_per_token(is_valid, lengths), kl_penalty(old, reference, algorithm.kl.estimator), 0.0
    )
    coefficient = coefficient_of(context)
    reported = divergence[repeat_per_token(is_reported, lengths)]
    context.metrics.mean("reward/kl", reported.sum(), len(reported))
    adapt_coefficient(context, reported.sum(), len(reported), int(is_reported.sum()))
    return rewards, coefficient * divergence


def _sample_advantages(rewards: Tensor, batch: Batch, context: StageContext) -> Tensor:
    """[n]: one advantage for all tokens of a response."""
    config, group_ids = context.recipe.algorithm.advantage, batch.group_ids
    is_valid, lengths = batch.dense("reward_valid"), batch.dense("response_lengths")
    match config:
        case GrpoAdvantage(normalize_by_std=normalize, epsilon=epsilon):
            return grpo_advantages(rewards, is_valid, group_ids, normalize_by_std=normalize, epsilon=epsilon)
        case RlooAdvantage():
            return rloo_advantages(rewards, is_valid, group_ids)
        case OpoAdvantage():
            return opo_advantages(rewards, is_valid, lengths, group_ids)
        case GpgAdvantage():
            share = _signal_share(rewards, is_valid, group_ids, context)
            return gpg_advantages(rewards, is_valid, group_ids, signal_share=share)
        case CpgdAdvantage(max_weight=max_weight):
            share = _signal_share(rewards, is_valid, group_ids, context)
            return cpgd_advantages(rewards, is_valid, group_ids, signal_share=share, max_weight=max_weight)
        case PassAtKAdvantage(k=k, correct_at=correct_at):
            return pass_at_k_advantages(rewards >= correct_at, is_valid, group_ids, k=k)
        case RejectionAdvantage(correct_at=correct_at):
            # The same tokens count here as in the mean of the update.
            is_correct, counted = rewards >= correct_at, lengths * counted_samples(batch, context)
            tokens = context.sum(torch.stack([(counted * is_correct).sum(), counted.sum()]).double())
            return rejection_advantages(is_correct, is_valid, correct_share=float(tokens[0] / tokens[1].clamp(min=1)))
        case FunctionAdvantage(function=name):
            function = load_function(name, "algorithm.advantage.function", num_arguments=4)
            result = function(rewards, is_valid, lengths, group_ids)
            if not isinstance(result, Tensor) or result.shape != rewards.shape:
                raise ValueError(
                    f"algorithm.advantage.function={name} must return one advantage for each of the {len(rewards)} "
                    "samples, as a tensor"
                )
            return torch.where(is_valid, result.float(), 0.0)
    raise AssertionError(f"node '{context.node.name}' cannot compute {config.type}")


def _signal_share(rewards: Tensor, is_valid: Tensor, group_ids: Tensor, context: StageContext) -> float:
    with_signal, count = context.sum(count_groups(rewards, is_valid, group_ids)).tolist()
    return float(with_signal / max(count, 1.0))


def _token_advantages(batch: Batch, rewards: Tensor, penalties: Tensor, context: StageContext) -> dict[str, Tensor]:
    """Advantages that differ from token to token, [total] each; failed samples get 0.

    Only samples that train count in whitening, as in the mean of the update, and the others get 0.
    """
    config = context.recipe.algorithm.advantage
    lengths, is_valid = batch.dense("response_lengths"), batch.dense("reward_valid")
    is_counted = repeat_per_token(is_valid, lengths)
    if isinstance(config, DistillationAdvantage):
        gains = distillation_advantages(batch.jagged("old_log_probs").values, batch.jagged("ref_log_probs").values)
        context.metrics.mean("distillation/divergence", -gains[is_counted].sum(), is_counted.sum())
        return {"advantages": torch.where(is_counted, gains, 0.0)}
    if isinstance(config, GaeAdvantage):
        token_rewards = token_level_rewards(rewards, is_valid, penalties, lengths)
        values = batch.jagged("values").values
        gains, returns = gae_advantages(token_rewards, values, lengths, discount=config.discount, decay=config.decay)
        columns = {"returns": returns}
        if not config.whiten:
            return columns | {"advantages": torch.where(is_counted, gains, 0.0)}
    else:
        assert isinstance(config, ReinforceAdvantage)
        if config.group_baseline:
            groups = Groups.of(rewards, is_valid, batch.group_ids)
            rewards = groups.keep_signal(groups.centered())
        token_rewards = token_level_rewards(rewards, is_valid, penalties, lengths)
        gains, columns = reinforce_advantages(token_rewards, lengths, discount=config.discount), {}
    is_counted = repeat_per_token(counted_samples(batch, context), lengths)
    moments = Moments.of(context.sum(Moments.count(gains, is_counted)))
    return columns | {"advantages": whiten(gains, is_counted, moments, epsilon=config.epsilon)}


def _report(context: StageContext, advantages: Tensor, batch: Batch) -> None:
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.dense("response_lengths"))
    size = torch.zeros(len(batch)).index_add(0, sample, advantages.abs())
    silent, groups = count_groups_without_signal(size, batch.group_ids)
    context.metrics.mean("group/no_signal", silent, groups)
