"""The stages that turn rewards into advantages, or drop groups that would have none."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless import algorithms
from leaderless.algorithms import Groups, Moments, repeat_per_token
from leaderless.config import algorithm as settings
from leaderless.config.functions import load_function
from leaderless.data.batch import Batch, Jagged
from leaderless.stages.context import StageContext
from leaderless.stages.losses import adapt_kl_coefficient, kl_coefficient
from leaderless.stages.mini_batches import counted_samples
from leaderless.stages.reward import is_sampled


def advantage(batch: Batch, context: StageContext) -> Batch:
    """Compute the recipe's advantage of every sampled token, and the returns for a critic."""
    lengths = batch.dense("response_lengths")
    rewards, penalties = _shaped_rewards(batch, context)
    if context.recipe.algorithm.advantage.type in settings.TOKEN_ADVANTAGES:
        columns = _token_advantages(batch, rewards, penalties, context)
    else:
        totals = rewards - algorithms.segment_sum(penalties, lengths)
        advantages = _sample_advantages(totals, batch, context)
        columns = {"advantages": repeat_per_token(advantages, lengths)}
    _report(context, columns["advantages"], batch)
    return batch.with_columns({name: Jagged(values, lengths, "response_tokens") for name, values in columns.items()})


def remax(batch: Batch, context: StageContext) -> Batch:
    """Subtract the reward of the greedy response to the same prompt from the others', then drop the greedy response."""
    is_greedy, is_valid = batch.dense("is_greedy"), batch.dense("reward_valid")
    rewards, penalties = _shaped_rewards(batch, context)
    totals = rewards - algorithms.segment_sum(penalties, batch.dense("response_lengths"))
    order = torch.argsort(batch.group_ids[is_greedy])
    place = order[torch.searchsorted(batch.group_ids[is_greedy][order], batch.group_ids)]
    advantages = algorithms.remax_advantages(totals, is_valid, totals[is_greedy][place], is_valid[is_greedy][place])
    kept = batch.select(~is_greedy)
    lengths = kept.dense("response_lengths")
    values = repeat_per_token(advantages[~is_greedy], lengths)
    _report(context, values, kept)
    return kept.with_columns(advantages=Jagged(values, lengths, "response_tokens"))


def dynamic_sampling(batch: Batch, context: StageContext) -> Batch:
    """Keep the groups with a signal: at least two valid rewards, and not all the same.

    Source: DAPO, arXiv 2503.14476, section 3.2, equation 11, which keeps prompts that some but not all responses answer
    correctly. Here the raw rewards are compared, before any shaping, so that graded rewards work too; a dropped group
    counts as all right if its rewards are above 0.
    """
    groups = Groups.of(batch.dense("rewards"), batch.dense("reward_valid"), batch.group_ids)
    is_reporting = context.node.layout.is_first_of_shard(context.process_group.rank)
    is_silent, is_right = (groups.count >= 2) & ~groups.has_signal, groups.mean > 0
    for name, counted in {
        "kept": groups.has_signal,
        "dropped_all_right": is_silent & is_right,
        "dropped_all_wrong": is_silent & ~is_right,
        "dropped_failed": groups.count < 2,
    }.items():
        context.metrics.total(f"sampling/{name}", counted.sum() if is_reporting else 0)
    return batch.select(groups.has_signal[groups.index])


def _shaped_rewards(batch: Batch, context: StageContext) -> tuple[Tensor, Tensor]:
    """Rewards with the penalty for length, [n], and the KL penalty of each token, [total]; 0 for failed rows."""
    algorithm, lengths = context.recipe.algorithm, batch.dense("response_lengths")
    is_valid = batch.dense("reward_valid")
    is_reported = is_valid & is_sampled(batch)
    rewards = torch.where(is_valid, batch.dense("rewards"), 0.0)
    if buffer := algorithm.overlong.buffer_tokens:
        longest = context.recipe.rollout.max_response_tokens
        penalty = algorithms.overlong_penalty(lengths, max_tokens=longest, buffer_tokens=buffer)
        context.metrics.mean("reward/overlong_penalty", penalty[is_reported].sum(), is_reported.sum())
        rewards = torch.where(is_valid, rewards + penalty, 0.0)
    if algorithm.kl.place == "loss" or not algorithm.uses_reference:
        return rewards, torch.zeros(int(lengths.sum()))
    old, reference = batch.jagged("old_log_probs").values, batch.jagged("ref_log_probs").values
    divergence = algorithms.kl_penalty(old, reference, algorithm.kl.estimator)
    divergence = torch.where(repeat_per_token(is_valid, lengths), divergence, 0.0)
    coefficient = kl_coefficient(context)
    reported = divergence[repeat_per_token(is_reported, lengths)]
    context.metrics.mean("reward/kl", reported.sum(), len(reported))
    adapt_kl_coefficient(context, reported.sum(), len(reported), int(is_reported.sum()))
    return rewards, coefficient * divergence


def _sample_advantages(rewards: Tensor, batch: Batch, context: StageContext) -> Tensor:
    """[n]: one advantage for all tokens of a response."""
    config, group_ids = context.recipe.algorithm.advantage, batch.group_ids
    is_valid, lengths = batch.dense("reward_valid"), batch.dense("response_lengths")
    match config:
        case settings.GrpoAdvantage(normalize_by_std=normalize, epsilon=epsilon):
            return algorithms.grpo_advantages(rewards, is_valid, group_ids, normalize_by_std=normalize, epsilon=epsilon)
        case settings.RlooAdvantage():
            return algorithms.rloo_advantages(rewards, is_valid, group_ids)
        case settings.OpoAdvantage():
            return algorithms.opo_advantages(rewards, is_valid, lengths, group_ids)
        case settings.GpgAdvantage():
            share = _signal_share(rewards, is_valid, group_ids, context)
            return algorithms.gpg_advantages(rewards, is_valid, group_ids, signal_share=share)
        case settings.CpgdAdvantage(max_weight=max_weight):
            share = _signal_share(rewards, is_valid, group_ids, context)
            return algorithms.cpgd_advantages(rewards, is_valid, group_ids, signal_share=share, max_weight=max_weight)
        case settings.PassAtKAdvantage(k=k, correct_at=correct_at):
            return algorithms.pass_at_k_advantages(rewards >= correct_at, is_valid, group_ids, k=k)
        case settings.RejectionAdvantage(correct_at=correct_at):
            # The same tokens count here as in the mean of the update.
            is_correct, counted = rewards >= correct_at, lengths * counted_samples(batch, context)
            tokens = context.sum(torch.stack([(counted * is_correct).sum(), counted.sum()]).double())
            share = float(tokens[0] / tokens[1].clamp(min=1))
            return algorithms.rejection_advantages(is_correct, is_valid, correct_share=share)
        case settings.FunctionAdvantage(function=name):
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
    with_signal, count = context.sum(algorithms.count_groups(rewards, is_valid, group_ids)).tolist()
    return float(with_signal / max(count, 1.0))


def _token_advantages(batch: Batch, rewards: Tensor, penalties: Tensor, context: StageContext) -> dict[str, Tensor]:
    """Advantages that differ from token to token, [total] each; failed samples get 0.

    Only samples that train count in whitening, as in the mean of the update, and the others get 0.
    """
    config = context.recipe.algorithm.advantage
    lengths, is_valid = batch.dense("response_lengths"), batch.dense("reward_valid")
    is_counted = repeat_per_token(is_valid, lengths)
    if isinstance(config, settings.DistillationAdvantage):
        student, teacher = batch.jagged("old_log_probs").values, batch.jagged("ref_log_probs").values
        gains = algorithms.distillation_advantages(student, teacher)
        context.metrics.mean("distillation/divergence", -gains[is_counted].sum(), is_counted.sum())
        return {"advantages": torch.where(is_counted, gains, 0.0)}
    if isinstance(config, settings.GaeAdvantage):
        token_rewards = algorithms.token_level_rewards(rewards, is_valid, penalties, lengths)
        values, options = batch.jagged("values").values, {"discount": config.discount, "decay": config.decay}
        gains, returns = algorithms.gae_advantages(token_rewards, values, lengths, **options)
        columns = {"returns": returns}
        if not config.whiten:
            return columns | {"advantages": torch.where(is_counted, gains, 0.0)}
    else:
        assert isinstance(config, settings.ReinforceAdvantage)
        if config.group_baseline:
            groups = Groups.of(rewards, is_valid, batch.group_ids)
            rewards = groups.keep_signal(groups.centered())
        token_rewards = algorithms.token_level_rewards(rewards, is_valid, penalties, lengths)
        gains, columns = algorithms.reinforce_advantages(token_rewards, lengths, discount=config.discount), {}
    is_counted = repeat_per_token(counted_samples(batch, context), lengths)
    moments = Moments.of(context.sum(Moments.count(gains, is_counted)))
    return columns | {"advantages": algorithms.whiten(gains, is_counted, moments, epsilon=config.epsilon)}


def _report(context: StageContext, advantages: Tensor, batch: Batch) -> None:
    size = algorithms.segment_sum(advantages.abs(), batch.dense("response_lengths"))
    silent, groups = algorithms.count_groups_without_signal(size, batch.group_ids)
    context.metrics.mean("group/no_signal", silent, groups)
