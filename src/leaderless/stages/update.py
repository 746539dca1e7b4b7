"""The stages that change weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms import Denominators, kl_penalty, repeat_per_token, token_weights
from leaderless.config.algorithm import AlgorithmConfig
from leaderless.data.batch import Batch
from leaderless.models.causal_lm import TokenOutputs
from leaderless.rollout.sampling import uniform_noise
from leaderless.stages.context import StageContext
from leaderless.stages.kl import adapt_coefficient, coefficient_of
from leaderless.stages.losses import LossInputs, chosen_tokens, correction_weights, needs_chosen_tokens, policy_loss
from leaderless.training.engine import TokenLoss
from leaderless.training.micro_batches import MicroBatch, response_lengths

LossOfBatch = Callable[[Batch, Tensor, int], TokenLoss]
"""Makes the loss of a mini-batch, given the weight of each of its response tokens and its number, from 1."""


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
    recipe, algorithm = context.recipe, context.recipe.algorithm
    _check_version(batch, context)
    if context.step <= algorithm.critic.warmup_steps:
        return batch
    is_counted = batch.dense("reward_valid")
    if algorithm.overlong.filter:
        is_counted = is_counted & ~batch.dense("truncated")

    def make_loss(mini_batch: Batch, weights: Tensor, number: int) -> TokenLoss:
        is_chosen = _choose(mini_batch, context, number)
        return _PolicyGradientLoss(mini_batch, weights, is_chosen, algorithm, coefficient_of(context), context)

    _train(batch, is_counted, context, make_loss, recipe.rollout.temperature)
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
            f"node '{context.node.name}', rank {context.group.rank}, step {context.step}: sample "
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

    _train(batch, torch.ones(len(batch), dtype=torch.bool), context, make_loss, temperature=1.0)
    return batch


def _train(
    batch: Batch,
    is_counted: Tensor,
    context: StageContext,
    make_loss: LossOfBatch,
    temperature: float,
) -> None:
    """Optimiser steps on the mini-batches of a step."""
    engine, num_updates = context.role.train_engine, context.recipe.batch.updates_per_step
    algorithm = context.recipe.algorithm
    num_trained = batch.jagged("prompt_tokens").lengths.sum() + batch.jagged("tokens").lengths.sum()
    context.metrics.total("throughput/tokens", num_trained)
    for number, chosen in enumerate(_mini_batches(batch, context), start=1):
        mini_batch, counted = batch.select(chosen), is_counted[chosen]
        lengths = response_lengths(mini_batch.jagged("response_mask"))
        totals = Denominators(*context.sum(Denominators.count(lengths, counted)).tolist())
        longest = context.recipe.rollout.max_response_tokens
        weights = token_weights(algorithm.aggregation, lengths, counted, totals, norm_tokens=longest)
        token_loss = make_loss(mini_batch, weights, number)

        def reported_loss(outputs: TokenOutputs, micro_batch: MicroBatch, loss: TokenLoss = token_loss) -> Tensor:
            value = loss(outputs, micro_batch)
            context.metrics.total(_name(context, "loss"), value.detach() / num_updates)
            return value

        engine.forward_backward(
            engine.micro_batches(mini_batch),
            reported_loss,
            temperature,
            entropy_gradient=algorithm.entropy_coefficient > 0,
        )
        info = engine.optimizer_step()
        context.metrics.max(_name(context, "grad_norm"), info.grad_norm)
        context.metrics.max(_name(context, "learning_rate"), info.learning_rate)
        context.progress(number / num_updates)


def _name(context: StageContext, measure: str) -> str:
    """A metric of the role that is trained, as `policy/loss`."""
    return f"{context.node.node.role}/{measure}"


def _mini_batches(batch: Batch, context: StageContext) -> Iterator[Tensor]:
    """[n] bool for each update: this rank's rows of its mini-batch.

    Which prompts share an update follows from their ids alone, whatever rank their samples are on.
    """
    groups = torch.unique(context.gather(torch.unique(batch.group_ids)))
    place = torch.searchsorted(groups, batch.group_ids)
    num_updates = context.recipe.batch.updates_per_step
    part = place * num_updates // max(1, len(groups))
    for number in range(num_updates):
        yield part == number


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
            name: _take(self.batch.jagged(name).values, micro_batch, outputs)
            for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
            if name in self.batch
        }
        log_probs, lengths = outputs.log_probs, micro_batch.response_lengths.to(outputs.log_probs.device)
        # Without other updates in the step, the policy before them is the policy itself.
        old_log_probs = columns.get("old_log_probs", log_probs.detach())
        is_chosen = _take(self.is_chosen, micro_batch, outputs)
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
        return (_take(self.weights, micro_batch, outputs) * loss).sum()

    def _kl(self, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        config = self.config.kl
        penalty = kl_penalty(log_probs, ref_log_probs, config.estimator, unbiased_gradient=config.unbiased_gradient)
        self.context.metrics.mean(_name(self.context, "kl"), penalty.detach().sum(), len(penalty))
        return penalty

    def _report(self, is_clipped: Tensor, correction: Tensor, outputs: TokenOutputs) -> None:
        metrics, num_tokens = self.context.metrics, len(is_clipped)
        metrics.mean(_name(self.context, "clip_fraction"), is_clipped.sum(), num_tokens)
        metrics.mean(_name(self.context, "entropy"), outputs.entropies.detach().sum(), num_tokens)
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
        self.context.metrics.mean(_name(self.context, "entropy"), outputs.entropies.sum(), len(outputs.entropies))
        return -(_take(self.weights, micro_batch, outputs) * outputs.log_probs).sum()


def _take(values: Tensor, micro_batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
    """A column of response tokens, as the micro-batch orders them."""
    return values[micro_batch.response_index].to(outputs.log_probs.device)
