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
from leaderless.rollout.sampling import uniform_noise
from leaderless.stages.context import StageContext
from leaderless.stages.kl import adapt_coefficient, coefficient_of
from leaderless.stages.losses import LossInputs, chosen_tokens, correction_weights, needs_chosen_tokens, policy_loss
from leaderless.stages.mini_batches import metric_name, take, train_mini_batches
from leaderless.training.engine import TokenLoss
from leaderless.training.micro_batches import MicroBatch


def update(batch: Batch, context: StageContext) -> Batch:
    """`batch.updates_per_step` steps on the policy loss, with the penalties and corrections of the recipe.

    Args:
        batch: Samples with advantages.
        context: Whose role is trained.

    Returns:
        The samples as they are.

    Raises:
        RuntimeError: A sample was drawn with other weights than those that are about to be trained, and was not carried
            over by a loop.
    """
    algorithm, engine = context.recipe.algorithm, context.role.train_engine
    _check_version(batch, context)
    _report_size(batch, context)
    if context.step <= algorithm.critic.warmup_steps:
        return batch
    is_counted = batch.dense("reward_valid")
    if algorithm.overlong.filter:
        is_counted = is_counted & ~batch.dense("truncated")

    def make_loss(mini_batch: Batch, weights: Tensor, number: int) -> TokenLoss:
        is_chosen = _choose(mini_batch, context, number)
        return _PolicyGradientLoss(mini_batch, weights, is_chosen, algorithm, coefficient_of(context), context)

    backward = partial(
        engine.forward_backward,
        temperature=context.recipe.rollout.temperature,
        entropy_gradient=algorithm.entropy_coefficient > 0,
    )
    train_mini_batches(batch, is_counted, context, engine, algorithm.aggregation, make_loss, backward)
    if "ref_log_probs" in batch:
        divergence = kl_penalty(
            batch.jagged("rollout_log_probs").values, batch.jagged("ref_log_probs").values, algorithm.kl.estimator
        )
        adapt_coefficient(context, divergence.sum(), len(divergence), len(batch))
    return batch


def _check_version(batch: Batch, context: StageContext) -> None:
    """Samples must come from the weights that are about to be trained, or from those that a loop may have kept."""
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


def _choose(mini_batch: Batch, context: StageContext, number: int) -> Tensor:
    """[total] bool: tokens that the loss treats apart; none for most losses."""
    config, temperature = context.recipe.algorithm.policy_loss, context.recipe.rollout.temperature
    advantages = mini_batch.jagged("advantages")
    if not needs_chosen_tokens(config):
        return torch.zeros(len(advantages.values), dtype=torch.bool)
    is_fresh = number == 1 and "old_log_probs" in mini_batch
    scores = (
        mini_batch.jagged("old_log_probs") if is_fresh else context.role.train_engine.log_probs(mini_batch, temperature)
    )
    positions = torch.cat([torch.arange(length) for length in advantages.lengths.tolist()] or [torch.empty(0).long()])
    # Another stream of numbers than that which sampled the tokens.
    noise = uniform_noise(
        context.recipe.seed + context.step * 2**32, repeat_per_token(mini_batch.ids, advantages.lengths), positions
    )
    return chosen_tokens(config, scores.values, advantages.values, noise, context.sum)


def sft(batch: Batch, context: StageContext) -> Batch:
    """`batch.updates_per_step` steps on the negative log-likelihood of the given responses, a mean over tokens.

    Args:
        batch: Prompts with their responses.
        context: Whose role is trained.

    Returns:
        The rows as they are.
    """

    def make_loss(mini_batch: Batch, weights: Tensor, number: int) -> TokenLoss:  # noqa: ARG001
        return _ImitationLoss(weights, context)

    engine, is_counted = context.role.train_engine, torch.ones(len(batch), dtype=torch.bool)
    _report_size(batch, context)
    backward = partial(engine.forward_backward, temperature=1.0)
    aggregation = context.recipe.algorithm.aggregation
    train_mini_batches(batch, is_counted, context, engine, aggregation, make_loss, backward)
    return batch


def _report_size(batch: Batch, context: StageContext) -> None:
    """Tokens of the step's samples, each once however many roles are trained on them."""
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
        columns = {
            name: take(self.batch.jagged(name).values, micro_batch, outputs.log_probs)
            for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
            if name in self.batch
        }
        log_probs, lengths = outputs.log_probs, micro_batch.response_lengths.to(outputs.log_probs.device)
        # Without other updates in the step, the policy before them is the policy itself.
        old_log_probs = columns.get("old_log_probs", log_probs.detach())
        is_chosen = take(self.is_chosen, micro_batch, outputs.log_probs)
        inputs = LossInputs(log_probs, old_log_probs, columns["advantages"], lengths, is_chosen)
        policy = policy_loss(self.config.policy_loss, inputs)
        correction = correction_weights(self.config.correction, old_log_probs, columns["rollout_log_probs"], lengths)
        loss = correction * policy.loss
        if "ref_log_probs" in columns:
            loss = loss + self.kl_coefficient * self._kl(log_probs, columns["ref_log_probs"])
        if self.config.entropy_coefficient:
            loss = loss - self.config.entropy_coefficient * outputs.entropies
        self._report(policy.is_clipped, correction, outputs)
        _report_mismatch(columns["rollout_log_probs"] - old_log_probs, self.context)
        return (take(self.weights, micro_batch, outputs.log_probs) * loss).sum()

    def _kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        config = self.config.kl
        penalty = kl_penalty(log_probs, ref_log_probs, config.estimator, unbiased_gradient=config.unbiased_gradient)
        self.context.metrics.mean(metric_name(self.context, "kl"), penalty.detach().sum(), len(penalty))
        return penalty

    def _report(self, is_clipped: Tensor, correction: Tensor, outputs: TokenOutputs) -> None:
        metrics, num_tokens = self.context.metrics, len(is_clipped)
        metrics.mean(metric_name(self.context, "clip_fraction"), is_clipped.sum(), num_tokens)
        metrics.mean(metric_name(self.context, "entropy"), outputs.entropies.detach().sum(), num_tokens)
        if self.config.correction.type != "none":
            metrics.mean("correction/weight", correction.sum(), num_tokens)
            metrics.mean("correction/dropped", (correction == 0).sum(), num_tokens)


def _report_mismatch(difference: Tensor, context: StageContext) -> None:
    """How far the engine's log-probabilities are from the trainer's, before this step's updates."""
    context.metrics.mean("mismatch/abs_mean", difference.abs().sum(), len(difference))
    context.metrics.max("mismatch/abs_max", difference.abs().max() if len(difference) else 0.0)
    context.metrics.mean("mismatch/kl", difference.sum(), len(difference))


@dataclass(frozen=True)
class _ImitationLoss:
    """The negative log-likelihood of a mini-batch, one micro-batch at a time."""

    weights: Tensor
    context: StageContext

    def __call__(self, outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        self.context.metrics.mean(metric_name(self.context, "entropy"), outputs.entropies.sum(), len(outputs.entropies))
        return -(take(self.weights, micro_batch, outputs.log_probs) * outputs.log_probs).sum()
