"""The stages that change the weights of language models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from leaderless.algorithms import kl_penalty, repeat_per_token
from leaderless.config.algorithm import AlgorithmConfig
from leaderless.data.batch import Batch
from leaderless.models.causal_lm import TokenOutputs
from leaderless.observability.metrics import Metrics
from leaderless.rollout.sampling import uniform_noise
from leaderless.stages.context import StageContext
from leaderless.stages.kl import adapt_coefficient, coefficient_of
from leaderless.stages.losses import LossInputs, chosen_tokens, correction_weights, needs_chosen_tokens, policy_loss
from leaderless.stages.mini_batches import counted_samples, metric_name, take, train_mini_batches
from leaderless.training.engine import TokenLoss
from leaderless.training.micro_batches import MicroBatch


def update(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the policy loss, with the recipe's penalties and corrections.

    Raises:
        RuntimeError: A sample was drawn with other weights than those about to be trained, and is not a loop's surplus.
    """
    algorithm, engine = context.recipe.algorithm, context.role.train_engine
    _check_version(batch, context)
    _report_size(batch, context)
    if context.step <= algorithm.critic.warmup_steps:
        return batch
    is_counted = counted_samples(batch, context)

    def make_loss(mini_batch: Batch, weights: Tensor, number: int) -> TokenLoss:
        is_chosen = _choose(mini_batch, weights > 0, context, number)
        return _PolicyGradientLoss(mini_batch, weights, is_chosen, algorithm, coefficient_of(context), context)

    backward = partial(
        engine.forward_backward,
        temperature=context.recipe.rollout.temperature,
        entropy_gradient=algorithm.entropy_coefficient > 0,
    )
    train_mini_batches(batch, is_counted, context, engine, algorithm.aggregation, make_loss, backward)
    if "ref_log_probs" in batch:
        sampled = batch.jagged("rollout_log_probs")
        divergence = kl_penalty(sampled.values, batch.jagged("ref_log_probs").values, algorithm.kl.estimator)
        divergence = divergence[repeat_per_token(is_counted, sampled.lengths)]
        adapt_coefficient(context, divergence.sum(), len(divergence), int(is_counted.sum()))
    return batch


def _check_version(batch: Batch, context: StageContext) -> None:
    """Samples must come from the weights about to be trained, or be as old as a loop's surplus may be."""
    version, limit = context.role.train_engine.policy_version, context.node.max_staleness
    staleness = version - batch.dense("policy_versions")
    wrong = (staleness < 0) | (staleness > limit)
    if bool(wrong.any()):
        raise RuntimeError(
            f"node '{context.node.name}', rank {context.process_group.rank}, step {context.step}: sample "
            f"{int(batch.ids[wrong][0])} was drawn by policy version {int(batch.dense('policy_versions')[wrong][0])}, "
            f"but version {version} is trained"
            + (f" and a sample may be {limit} behind" if limit else "")
            + ": the rollout did not get the new weights"
        )
    context.metrics.mean("rollout/staleness", staleness.sum(), len(staleness))


def _choose(mini_batch: Batch, is_counted: Tensor, context: StageContext, number: int) -> Tensor:
    """[total] bool: tokens that the loss treats differently, among those that count; none for most losses."""
    config, temperature = context.recipe.algorithm.policy_loss, context.recipe.rollout.temperature
    advantages = mini_batch.jagged("advantages")
    if not needs_chosen_tokens(config):
        return torch.zeros(len(advantages.values), dtype=torch.bool)
    is_fresh = number == 1 and "old_log_probs" in mini_batch
    scores = (
        mini_batch.jagged("old_log_probs") if is_fresh else context.role.train_engine.log_probs(mini_batch, temperature)
    )
    positions = torch.cat([torch.arange(length) for length in advantages.lengths.tolist()] or [torch.empty(0).long()])
    # Independent of the noise that sampled the tokens.
    noise = uniform_noise(
        context.recipe.seed + context.step * 2**32, repeat_per_token(mini_batch.ids, advantages.lengths), positions
    )
    is_chosen = torch.zeros_like(is_counted)
    columns = (scores.values[is_counted], advantages.values[is_counted], noise[is_counted])
    is_chosen[is_counted] = chosen_tokens(config, *columns, context.sum)
    return is_chosen


def sft(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the negative log-likelihood of the given responses."""

    def make_loss(mini_batch: Batch, weights: Tensor, number: int) -> TokenLoss:  # noqa: ARG001
        return _ImitationLoss(weights, context)

    engine, is_counted = context.role.train_engine, torch.ones(len(batch), dtype=torch.bool)
    _report_size(batch, context)
    backward = partial(engine.forward_backward, temperature=1.0)
    aggregation = context.recipe.algorithm.aggregation
    train_mini_batches(batch, is_counted, context, engine, aggregation, make_loss, backward)
    return batch


def _report_size(batch: Batch, context: StageContext) -> None:
    """Count the tokens of the step's samples."""
    count = batch.jagged("prompt_tokens").lengths.sum() + batch.jagged("tokens").lengths.sum()
    context.metrics.total("throughput/tokens", count)


@dataclass(frozen=True)
class _PolicyGradientLoss:
    """The policy loss of a mini-batch with its penalties, one micro-batch at a time."""

    batch: Batch
    weights: Tensor
    is_chosen: Tensor
    config: AlgorithmConfig
    kl_coefficient: float
    context: StageContext

    def __call__(self, outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        weights = take(self.weights, micro_batch, outputs.log_probs)
        is_counted = weights > 0
        # Replace the values of tokens that do not count before computing with them: 0 times NaN is NaN.
        log_probs = torch.where(is_counted, outputs.log_probs, 0.0)
        columns = {
            name: torch.where(is_counted, take(self.batch.jagged(name).values, micro_batch, log_probs), 0.0)
            for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
            if name in self.batch
        }
        lengths = micro_batch.response_lengths.to(log_probs.device)
        # Without other updates in the step, the policy before them is the policy itself.
        old_log_probs = columns.get("old_log_probs", log_probs.detach())
        is_chosen = take(self.is_chosen, micro_batch, log_probs)
        inputs = LossInputs(log_probs, old_log_probs, columns["advantages"], lengths, is_chosen)
        policy = policy_loss(self.config.policy_loss, inputs)
        correction = correction_weights(self.config.correction, old_log_probs, columns["rollout_log_probs"], lengths)
        loss = correction * policy.loss
        report = partial(_report_mean, self.context.metrics, is_counted)
        if "ref_log_probs" in columns:
            penalty = self._kl(log_probs, columns["ref_log_probs"])
            loss = loss + self.kl_coefficient * penalty
            report(metric_name(self.context, "kl"), penalty.detach())
        if self.config.entropy_coefficient:
            loss = loss - self.config.entropy_coefficient * torch.where(is_counted, outputs.entropies, 0.0)
        report(metric_name(self.context, "clip_fraction"), policy.is_clipped)
        report(metric_name(self.context, "entropy"), outputs.entropies.detach())
        if self.config.correction.type != "none":
            report("correction/weight", correction)
            report("correction/dropped", correction == 0)
        # Distance between the engine's log-probabilities and the trainer's before this step's updates.
        difference = columns["rollout_log_probs"] - old_log_probs
        report("mismatch/abs_mean", difference.abs())
        self.context.metrics.max("mismatch/abs_max", difference.abs().max() if len(difference) else 0.0)
        report("mismatch/kl", difference)
        return (weights * loss).sum()

    def _kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        config = self.config.kl
        return kl_penalty(log_probs, ref_log_probs, config.estimator, unbiased_gradient=config.unbiased_gradient)


def _report_mean(metrics: Metrics, is_counted: Tensor, name: str, values: Tensor) -> None:
    """Report the mean over the tokens that count."""
    metrics.mean(name, torch.where(is_counted, values, 0).sum(), is_counted.sum())


@dataclass(frozen=True)
class _ImitationLoss:
    """The negative log-likelihood of a mini-batch, one micro-batch at a time."""

    weights: Tensor
    context: StageContext

    def __call__(self, outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        self.context.metrics.mean(metric_name(self.context, "entropy"), outputs.entropies.sum(), len(outputs.entropies))
        return -(take(self.weights, micro_batch, outputs.log_probs) * outputs.log_probs).sum()
