"""The stages that use and train a critic."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from leaderless.algorithms import Moments, clipped_value_loss, repeat_per_token
from leaderless.data.batch import Batch
from leaderless.stages.context import StageContext
from leaderless.stages.mini_batches import MiniBatch, counted_samples, make_update, metric_name, mini_batches, take
from leaderless.training.micro_batches import MicroBatch


def values(batch: Batch, context: StageContext) -> Batch:
    """Add the critic's value before each sampled token."""
    return batch.with_columns(values=context.critic.values(batch))


def update_critic(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the clipped squared error, averaged over tokens.

    Mini-batches, and the samples that carry a gradient, are the same as for the policy.
    """
    engine, is_counted = context.critic, counted_samples(batch, context)
    _report_fit(batch, is_counted, context)
    for mini_batch in mini_batches(batch, is_counted, "token_mean", context):
        make_update(engine, mini_batch, engine.forward, partial(_value_loss, context, mini_batch), context)
    return batch


def _value_loss(context: StageContext, mini_batch: MiniBatch, outputs: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The value loss of a micro-batch."""
    weights = take(mini_batch.weights, micro_batch, outputs)
    is_counted = weights > 0
    # Replace the values of tokens that do not count before computing with them: 0 times NaN is NaN.
    old, returns = (
        torch.where(is_counted, take(mini_batch.rows.jagged(name).values, micro_batch, outputs), outputs.detach())
        for name in ("values", "returns")
    )
    loss = clipped_value_loss(outputs, old, returns, clip=context.recipe.algorithm.critic.value_clip or math.inf)
    name = metric_name(context, "clip_fraction")
    context.metrics.mean(name, (loss.is_clipped & is_counted).sum(), is_counted.sum())
    return (weights * loss.loss).sum()


def _report_fit(batch: Batch, is_counted: Tensor, context: StageContext) -> None:
    """Report how good the critic was before the updates: 1 - Var(returns - values) / Var(returns), over all ranks."""
    expected, returns = batch.jagged("values"), batch.jagged("returns").values
    counts = repeat_per_token(is_counted, expected.lengths)
    context.metrics.mean(metric_name(context, "value_mean"), expected.values[counts].sum(), counts.sum())
    left = Moments.of(context.sum(Moments.count(returns - expected.values, counts)))
    whole = Moments.of(context.sum(Moments.count(returns, counts)))
    if whole.std > 0:
        context.metrics.max(metric_name(context, "explained_variance"), 1 - (left.std / whole.std) ** 2)
