"""The policy loss that a recipe asks for, on one micro-batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms import (
    PolicyLoss,
    choose_for_clip_cov,
    cispo_loss,
    clip_cov_loss,
    clipped_policy_loss,
    covariances,
    cpgd_loss,
    gmpo_loss,
    gspo_loss,
    importance_ratios,
    is_within,
    kl_cov_loss,
    masked_weights,
    reinforce_loss,
    sapo_loss,
    threshold_of_top,
    truncated_weights,
)
from leaderless.config.algorithm import (
    CispoLoss,
    ClipCovLoss,
    CorrectionConfig,
    CpgdLoss,
    FunctionLoss,
    GmpoLoss,
    GspoLoss,
    KlCovLoss,
    PolicyLossConfig,
    PpoLoss,
    ReinforceLoss,
    SapoLoss,
)
from leaderless.config.functions import load_function


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


def policy_loss(config: PolicyLossConfig, inputs: LossInputs) -> PolicyLoss:
    """The loss of each token of a micro-batch."""
    new, old, gain, lengths = inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.lengths
    match config:
        case PpoLoss(clip_low=low, clip_high=high, dual_clip=dual):
            return clipped_policy_loss(new, old, gain, clip_low=low, clip_high=high, dual_clip=dual or math.inf)
        case ReinforceLoss():
            return reinforce_loss(new, gain)
        case GspoLoss(clip_low=low, clip_high=high):
            return gspo_loss(new, old, gain, lengths, clip_low=low, clip_high=high)
        case GmpoLoss(clip_low=low, clip_high=high):
            return gmpo_loss(new, old, gain, lengths, clip_low=low, clip_high=high)
        case CispoLoss(clip_low=low, clip_high=high):
            return cispo_loss(new, old, gain, clip_low=low, clip_high=high)
        case CpgdLoss():
            return cpgd_loss(new, old, gain, **config.model_dump(exclude={"type"}))
        case SapoLoss():
            return sapo_loss(new, old, gain, **config.model_dump(exclude={"type"}))
        case ClipCovLoss(clip_low=low, clip_high=high):
            return clip_cov_loss(new, old, gain, inputs.is_chosen, clip_low=low, clip_high=high)
        case KlCovLoss(coefficient=coefficient):
            return kl_cov_loss(new, old, gain, inputs.is_chosen, coefficient=coefficient)
        case FunctionLoss(function=name):
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


def needs_chosen_tokens(config: PolicyLossConfig) -> bool:
    """Whether a loss treats some tokens of the mini-batch differently."""
    return isinstance(config, ClipCovLoss | KlCovLoss)


def chosen_tokens(
    config: PolicyLossConfig,
    log_probs: Tensor,
    advantages: Tensor,
    noise: Tensor,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Tensor:
    """Tokens of a mini-batch that Clip-Cov or KL-Cov treats differently, chosen among those of all ranks.

    Args:
        config: Settings of the loss.
        log_probs: [total] under the current policy.
        advantages: [total].
        noise: [total], uniform between 0 and 1, determined by sample and position.
        sum_over_ranks: Sum over ranks; all ranks call it equally often.

    Returns:
        [total] bool.
    """
    sums = torch.tensor([float(len(log_probs)), float(log_probs.double().sum()), float(advantages.double().sum())])
    count, total, gain = sum_over_ranks(sums.double()).tolist()
    means = {"mean_log_prob": total / max(count, 1.0), "mean_advantage": gain / max(count, 1.0)}
    covariance = covariances(log_probs, advantages, **means)
    if isinstance(config, ClipCovLoss):
        in_range = is_within(covariance, config.lowest, config.highest)
        num_in_range = float(sum_over_ranks(in_range.sum().double()))
        return choose_for_clip_cov(in_range, noise, probability=config.fraction * count / max(num_in_range, 1.0))
    assert isinstance(config, KlCovLoss)
    highest = sum_over_ranks(covariance.double().abs().sum())
    num_chosen = max(1, int(config.fraction * count))
    return covariance >= threshold_of_top(covariance, num_chosen, sum_over_ranks, float(highest))


def correction_weights(config: CorrectionConfig, old: Tensor, rollout: Tensor, lengths: Tensor) -> Tensor:
    """[total]: the weight of each token that corrects for its having been sampled by another policy.

    Args:
        config: Settings of the correction.
        old: [total], the trainer's log-probabilities before this step's updates.
        rollout: [total], the engine's log-probabilities at sampling time.
        lengths: [n] int64, response tokens of each sample.
    """
    if config.type == "none":
        return torch.ones_like(old)
    ratios = importance_ratios(old, rollout, lengths, config.level)
    match config.type:
        case "truncate":
            return truncated_weights(ratios, highest=config.highest)
        case "mask":
            return masked_weights(ratios, lowest=config.lowest, highest=config.highest)
        case "reject":
            return is_within(ratios, config.lowest, config.highest).to(ratios.dtype)
