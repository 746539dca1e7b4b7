"""The policy loss that a recipe asks for, on one micro-batch at a time, and the weight of its KL penalty."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless import algorithms
from leaderless.algorithms import PolicyLoss
from leaderless.config import algorithm as settings
from leaderless.config.functions import load_function
from leaderless.stages.context import StageContext

KL_STATE = "kl_coefficient"
"""Name, in the state of a node, of the weight of the KL penalty."""


@dataclass(frozen=True)
class LossInputs:
    """The response tokens of a micro-batch.

    Attributes:
        log_probs: [total] under the current policy, with gradient.
        old_log_probs: [total] under the policy before this step's updates.
        advantages: [total].
        lengths: [n] int64, response tokens of each sample.
        is_chosen: [total] bool, tokens that the loss treats differently; see `chosen_tokens`.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    lengths: Tensor
    is_chosen: Tensor


def policy_loss(config: settings.PolicyLossConfig, inputs: LossInputs) -> PolicyLoss:
    """The loss of each token of a micro-batch."""
    new, old, gain, lengths = inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.lengths
    match config:
        case settings.PpoLoss(clip_low=low, clip_high=high, dual_clip=dual):
            dual = dual or math.inf
            return algorithms.clipped_policy_loss(new, old, gain, clip_low=low, clip_high=high, dual_clip=dual)
        case settings.ReinforceLoss():
            return algorithms.reinforce_loss(new, gain)
        case settings.GspoLoss(clip_low=low, clip_high=high):
            return algorithms.gspo_loss(new, old, gain, lengths, clip_low=low, clip_high=high)
        case settings.GmpoLoss(clip_low=low, clip_high=high):
            return algorithms.gmpo_loss(new, old, gain, lengths, clip_low=low, clip_high=high)
        case settings.CispoLoss(clip_low=low, clip_high=high):
            return algorithms.cispo_loss(new, old, gain, clip_low=low, clip_high=high)
        case settings.CpgdLoss():
            return algorithms.cpgd_loss(new, old, gain, **config.model_dump(exclude={"type"}))
        case settings.SapoLoss():
            return algorithms.sapo_loss(new, old, gain, **config.model_dump(exclude={"type"}))
        case settings.ClipCovLoss(clip_low=low, clip_high=high):
            return algorithms.clip_cov_loss(new, old, gain, inputs.is_chosen, clip_low=low, clip_high=high)
        case settings.KlCovLoss(coefficient=coefficient):
            return algorithms.kl_cov_loss(new, old, gain, inputs.is_chosen, coefficient=coefficient)
        case settings.FunctionLoss(function=name):
            return _own_loss(name, inputs)


def _own_loss(name: str, inputs: LossInputs) -> PolicyLoss:
    """The loss by a custom function."""
    function = load_function(name, "algorithm.policy_loss.function", num_arguments=4)
    loss = function(inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.lengths)
    if not isinstance(loss, Tensor) or loss.shape != inputs.log_probs.shape:
        found = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"algorithm.policy_loss.function={name} returned {found}; it must return the loss of each of the "
            f"{len(inputs.log_probs)} tokens, as a tensor"
        )
    return PolicyLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def needs_chosen_tokens(config: settings.PolicyLossConfig) -> bool:
    """Whether a loss treats some tokens of the mini-batch differently."""
    return isinstance(config, settings.ClipCovLoss | settings.KlCovLoss)


def chosen_tokens(
    config: settings.PolicyLossConfig,
    log_probs: Tensor,
    advantages: Tensor,
    noise: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Tensor:
    """[total] bool: tokens of a mini-batch that Clip-Cov or KL-Cov treats differently, chosen among those of all ranks.

    The log-probabilities are those of the current policy; the noise, uniform between 0 and 1, is determined by sample
    and position. All tensors are [total], and all ranks call `sum_over_ranks` equally often.
    """
    sums = torch.tensor([float(len(log_probs)), float(log_probs.double().sum()), float(advantages.double().sum())])
    count, total, gain = sum_over_ranks(sums.double()).tolist()
    means = {"mean_log_prob": total / max(count, 1.0), "mean_advantage": gain / max(count, 1.0)}
    covariance = algorithms.covariances(log_probs, advantages, **means)
    if isinstance(config, settings.ClipCovLoss):
        in_range = algorithms.is_within(covariance, config.lowest, config.highest)
        num_in_range = float(sum_over_ranks(in_range.sum().double()))
        probability = config.fraction * count / max(num_in_range, 1.0)
        return algorithms.choose_for_clip_cov(in_range, noise, probability=probability)
    assert isinstance(config, settings.KlCovLoss)
    highest = sum_over_ranks(covariance.double().abs().sum())
    num_chosen = max(1, int(config.fraction * count))
    return covariance >= algorithms.threshold_of_top(covariance, num_chosen, sum_over_ranks, float(highest))


def correction_weights(config: settings.CorrectionConfig, old: Tensor, rollout: Tensor, lengths: Tensor) -> Tensor:
    """[total]: the weight of each token that corrects for its having been sampled by another policy.

    The log-probabilities, [total], are the trainer's before this step's updates and the engine's at sampling time;
    `lengths`, [n] int64, are the response tokens of each sample.
    """
    if config.type == "none":
        return torch.ones_like(old)
    ratios = algorithms.importance_ratios(old, rollout, lengths, config.level)
    match config.type:
        case "truncate":
            return algorithms.truncated_weights(ratios, highest=config.highest)
        case "mask":
            return algorithms.masked_weights(ratios, lowest=config.lowest, highest=config.highest)
        case "reject":
            return algorithms.is_within(ratios, config.lowest, config.highest).to(ratios.dtype)


def kl_coefficient(context: StageContext) -> float:
    """The weight of the KL penalty in this step, from the state of the node that applies it."""
    return context.state.get(KL_STATE, context.recipe.algorithm.kl.coefficient)


def adapt_kl_coefficient(context: StageContext, total: Tensor, num_tokens: int, num_episodes: int) -> None:
    """Adapt the weight of the KL penalty for the next step, if there is a target and the policy is trained in this one.

    While only the critic is trained, the divergence does not respond to the weight: adapting it would drive it further
    away with each step of the warm-up. `total` is the sum of the divergence over this rank's tokens; both numbers are
    this rank's too.
    """
    algorithm, coefficient = context.recipe.algorithm, kl_coefficient(context)
    config = algorithm.kl
    if config.target is None:
        return
    context.metrics.max("policy/kl_coefficient", coefficient)
    if context.step <= algorithm.critic.warmup_steps:
        return
    divergence, tokens, count = context.sum(torch.tensor([float(total), num_tokens, num_episodes]).double()).tolist()
    if not math.isfinite(divergence):
        return  # guards decide what happens to the step
    context.state[KL_STATE] = algorithms.adapted_coefficient(
        coefficient,
        divergence / max(tokens, 1),
        target=config.target,
        horizon=config.horizon,
        num_episodes=int(count),
    )
