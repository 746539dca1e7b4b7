"""The optimizer updates made from one step's samples, for any model and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from leaderless.algorithms import Aggregation, Denominators, token_weights
from leaderless.data.batch import Batch
from leaderless.models.causal_lm import TokenOutputs
from leaderless.stages.context import StageContext
from leaderless.stages.guards import guarded_step
from leaderless.training.engine import Trainable
from leaderless.training.micro_batches import MicroBatch, response_lengths

Outputs = TypeVar("Outputs", bound=TokenOutputs | Tensor)
"""Outputs of a language model, or the [R] float32 values of a value model."""


@dataclass(frozen=True)
class MiniBatch:
    """This rank's part of the samples of one optimizer update.

    Attributes:
        number: Number of the update in its step, from 1.
        rows: Samples, or rows to imitate.
        weights: [total] float32, weight of each response token in the loss; 0 where it does not count. It contains the
            denominators, over all ranks, so that the loss is a plain sum.
    """

    number: int
    rows: Batch
    weights: Tensor


def mini_batches(
    batch: Batch, is_counted: Tensor, aggregation: Aggregation, context: StageContext
) -> Iterator[MiniBatch]:
    """Divide a step's prompts between its `batch.updates_per_step` updates.

    Which prompts share an update depends on their ids alone, not on ranks or on the role that is trained. Rows that do
    not count, [n] bool, carry no gradient; the aggregation turns the losses of tokens into one number.
    """
    groups = torch.unique(context.gather(torch.unique(batch.group_ids)))
    num_updates, longest = context.recipe.batch.updates_per_step, context.recipe.rollout.max_response_tokens
    part = torch.searchsorted(groups, batch.group_ids) * num_updates // max(1, len(groups))
    for number in range(num_updates):
        rows, counted = batch.select(part == number), is_counted[part == number]
        lengths = response_lengths(rows.jagged("response_mask"))
        totals = Denominators(*context.sum(Denominators.count(lengths, counted)).tolist())
        yield MiniBatch(number + 1, rows, token_weights(aggregation, lengths, counted, totals, norm_tokens=longest))


def make_update(
    engine: Trainable,
    mini_batch: MiniBatch,
    forward: Callable[[MicroBatch], Outputs],
    loss_of: Callable[[Outputs, MicroBatch], Tensor],
    context: StageContext,
) -> None:
    """Make an optimizer update: add up the gradients of all micro-batches, then take the step.

    Args:
        engine: Engine to train.
        mini_batch: Samples of the update.
        forward: Forward pass of the engine's model.
        loss_of: Loss of a micro-batch, given the model's outputs. The sum over micro-batches and ranks is the loss.
        context: Context of the node.
    """
    num_updates, metrics = context.recipe.batch.updates_per_step, context.metrics.copy()

    def add_gradients(micro_batches: Iterable[MicroBatch]) -> Tensor:
        # Where memory ran out, this starts again from scratch, with smaller micro-batches.
        engine.discard_gradient()
        context.metrics.go_back_to(metrics)
        sums = torch.zeros(3)
        for micro_batch in micro_batches:
            outputs = forward(micro_batch)
            loss = loss_of(outputs, micro_batch)
            scores = outputs.log_probs if isinstance(outputs, TokenOutputs) else outputs
            # Even a loss that depends on no output takes part in every collective of the backward pass.
            (loss + 0.0 * scores.sum()).backward()  # type: ignore[no-untyped-call]
            context.metrics.total(metric_name(context, "loss"), loss.detach() / num_updates)
            sums = sums.to(loss.device) + _numbers(loss, outputs, take(mini_batch.weights, micro_batch, scores) > 0)
        return sums

    loss, entropy, count = context.sum(engine.run_passes(mini_batch.rows, add_gradients).cpu()).tolist()
    info = guarded_step(engine, context, loss, entropy / count if count else None)
    context.metrics.max(metric_name(context, "grad_norm"), info.grad_norm)
    context.metrics.max(metric_name(context, "learning_rate"), info.learning_rate)
    context.progress(mini_batch.number / num_updates)


def _numbers(loss: Tensor, outputs: TokenOutputs | Tensor, is_counted: Tensor) -> Tensor:
    """[3]: the loss, the sum of the entropies of the tokens that count, and their number; no entropies of a critic."""
    if not isinstance(outputs, TokenOutputs):
        return torch.stack([loss.detach(), torch.zeros_like(loss), torch.zeros_like(loss)])
    entropies = torch.where(is_counted, outputs.entropies.detach(), 0.0)
    return torch.stack([loss.detach(), entropies.sum(), is_counted.sum().to(loss.dtype)])


def counted_samples(batch: Batch, context: StageContext) -> Tensor:
    """[n] bool: samples that carry a gradient, as their reward is valid and `algorithm.overlong.filter` keeps them."""
    is_valid = batch.dense("reward_valid")
    return is_valid & ~batch.dense("truncated") if context.recipe.algorithm.overlong.filter else is_valid


def metric_name(context: StageContext, measure: str) -> str:
    """Name of a metric of the node's role, such as `policy/loss`."""
    return f"{context.node.node.role}/{measure}"


def take(values: Tensor, micro_batch: MicroBatch, like: Tensor) -> Tensor:
    """A column of response tokens in the order of a micro-batch, on the device of `like`."""
    return values[micro_batch.response_index].to(like.device)
