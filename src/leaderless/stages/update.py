"""The stages that change weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms import Aggregation, Denominators, clipped_policy_loss, k3_penalty, token_weights
from leaderless.config.algorithm import AlgorithmConfig
from leaderless.data.batch import Batch
from leaderless.models.causal_lm import TokenOutputs
from leaderless.stages.context import StageContext
from leaderless.training.engine import TokenLoss
from leaderless.training.micro_batches import MicroBatch, response_lengths

LossOfBatch = Callable[[Batch, Tensor], TokenLoss]
"""Makes the loss of a mini-batch, given the weight of each of its response tokens."""


def update(batch: Batch, context: StageContext) -> Batch:
    """`batch.updates_per_step` steps on the clipped objective, with a KL penalty if its coefficient is above 0.

    Args:
        batch: Samples with advantages.
        context: Whose role is trained.

    Returns:
        The samples as they are.

    Raises:
        RuntimeError: A sample was drawn with other weights than those that are about to be trained.
    """
    version = context.role.train_engine.policy_version
    stale = batch.dense("policy_versions") != version
    if bool(stale.any()):
        raise RuntimeError(
            f"node '{context.node.name}', rank {context.group.rank}, step {context.step}: sample "
            f"{int(batch.ids[stale][0])} was drawn by policy version {int(batch.dense('policy_versions')[stale][0])}, "
            f"but version {version} is trained: the rollout did not get the new weights"
        )

    def make_loss(mini_batch: Batch, weights: Tensor) -> TokenLoss:
        return _PolicyGradientLoss(mini_batch, weights, context.recipe.algorithm, context)

    aggregation = context.recipe.algorithm.aggregation
    _train(batch, batch.dense("reward_valid"), context, make_loss, aggregation, context.recipe.rollout.temperature)
    return batch


def sft(batch: Batch, context: StageContext) -> Batch:
    """`batch.updates_per_step` steps on the negative log-likelihood of the given responses, a mean over tokens.

    Args:
        batch: Prompts with their responses.
        context: Whose role is trained.

    Returns:
        The rows as they are.
    """

    def make_loss(mini_batch: Batch, weights: Tensor) -> TokenLoss:  # noqa: ARG001
        return _ImitationLoss(weights, context)

    _train(batch, torch.ones(len(batch), dtype=torch.bool), context, make_loss, "token_mean", temperature=1.0)
    return batch


def _train(
    batch: Batch,
    is_valid: Tensor,
    context: StageContext,
    make_loss: LossOfBatch,
    aggregation: Aggregation,
    temperature: float,
) -> None:
    """Optimiser steps on the mini-batches of a step."""
    engine, num_updates = context.role.train_engine, context.recipe.batch.updates_per_step
    num_trained = batch.jagged("prompt_tokens").lengths.sum() + batch.jagged("tokens").lengths.sum()
    context.metrics.total("throughput/tokens", num_trained)
    for number, chosen in enumerate(_mini_batches(batch, context), start=1):
        mini_batch, valid = batch.select(chosen), is_valid[chosen]
        lengths = response_lengths(mini_batch.jagged("response_mask"))
        num_samples, num_tokens = context.sum(Denominators.count(lengths, valid)).tolist()
        weights = token_weights(aggregation, lengths, valid, Denominators(num_samples, num_tokens))
        token_loss = make_loss(mini_batch, weights)

        def reported_loss(outputs: TokenOutputs, micro_batch: MicroBatch, loss: TokenLoss = token_loss) -> Tensor:
            value = loss(outputs, micro_batch)
            context.metrics.total(_name(context, "loss"), value.detach() / num_updates)
            return value

        engine.forward_backward(engine.micro_batches(mini_batch), reported_loss, temperature)
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
    """The clipped objective of a mini-batch, one micro-batch at a time."""

    batch: Batch
    weights: Tensor
    config: AlgorithmConfig
    context: StageContext

    def __call__(self, outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        columns = {
            name: _take(self.batch.jagged(name).values, micro_batch, outputs)
            for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
            if name in self.batch
        }
        log_probs = outputs.log_probs
        # Without other updates in the step, the policy before them is the policy itself.
        old_log_probs = columns.get("old_log_probs", log_probs.detach())
        clip = self.config.policy_loss
        policy = clipped_policy_loss(
            log_probs, old_log_probs, columns["advantages"], clip_low=clip.clip_low, clip_high=clip.clip_high
        )
        loss, num_tokens = policy.loss, len(log_probs)
        metrics = self.context.metrics
        metrics.mean(_name(self.context, "clip_fraction"), policy.is_clipped.sum(), num_tokens)
        metrics.mean(_name(self.context, "entropy"), outputs.entropies.sum(), num_tokens)
        if "ref_log_probs" in columns:
            penalty = k3_penalty(log_probs, columns["ref_log_probs"])
            metrics.mean(_name(self.context, "kl"), penalty.detach().sum(), num_tokens)
            loss = loss + self.config.kl.coefficient * penalty
        _report_mismatch(columns["rollout_log_probs"] - old_log_probs, self.context)
        return (_take(self.weights, micro_batch, outputs) * loss).sum()


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
