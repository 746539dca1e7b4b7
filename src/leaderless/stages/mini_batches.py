"""The optimizer updates made from one step's samples, for any model and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic

import torch
from torch import Tensor

from leaderless.algorithms import Aggregation, Denominators, token_weights
from leaderless.data.batch import Batch
from leaderless.models.causal_lm import TokenOutputs
from leaderless.stages.context import StageContext
from leaderless.stages.guards import guarded_step
from leaderless.training.engine import LossOf, Outputs, Trainable
from leaderless.training.micro_batches import MicroBatch, response_lengths

LossOfBatch = Callable[[Batch, Tensor, int], LossOf[Outputs]]
"""Function that makes the loss of a mini-batch from the weights of its response tokens and its number, from 1."""


def train_mini_batches(
    batch: Batch,
    is_counted: Tensor,
    context: StageContext,
    engine: Trainable,
    aggregation: Aggregation,
    make_loss: LossOfBatch[Outputs],
    backward: Callable[[Sequence[MicroBatch], LossOf[Outputs]], None],
) -> None:
    """Make `batch.updates_per_step` optimizer updates, each on its share of the prompts.

    Args:
        batch: Samples, or rows to imitate.
        is_counted: [n] bool; rows that do not count carry no gradient.
        context: Context of the node.
        engine: Engine to train.
        aggregation: Rule by which the losses of tokens become one number.
        make_loss: Factory of each mini-batch's loss.
        backward: Function that adds the gradient of a loss to the engine's.
    """
    num_updates = context.recipe.batch.updates_per_step
    for number, chosen in enumerate(_mini_batches(batch, context), start=1):
        mini_batch, counted = batch.select(chosen), is_counted[chosen]
        lengths = response_lengths(mini_batch.jagged("response_mask"))
        totals = Denominators(*context.sum(Denominators.count(lengths, counted)).tolist())
        longest = context.recipe.rollout.max_response_tokens
        weights = token_weights(aggregation, lengths, counted, totals, norm_tokens=longest)
        loss = _Tally(make_loss(mini_batch, weights, number), context, num_updates)
        engine.run_passes(mini_batch, loss.passes(backward), partial(loss.undo, engine))
        info = guarded_step(engine, context, *loss.over_all_ranks())
        context.metrics.max(metric_name(context, "grad_norm"), info.grad_norm)
        context.metrics.max(metric_name(context, "learning_rate"), info.learning_rate)
        context.progress(number / num_updates)


def counted_samples(batch: Batch, context: StageContext) -> Tensor:
    """[n] bool: samples that carry a gradient, as their reward is valid and `algorithm.overlong.filter` keeps them."""
    is_valid = batch.dense("reward_valid")
    return is_valid & ~batch.dense("truncated") if context.recipe.algorithm.overlong.filter else is_valid


class _Tally(Generic[Outputs]):
    """The loss and the entropy of a mini-batch, summed over its micro-batches."""

    def __init__(self, loss: LossOf[Outputs], context: StageContext, num_updates: int) -> None:
        self._loss, self._context, self._num_updates = loss, context, num_updates
        self._metrics = context.metrics.copy()
        self._totals = torch.zeros(3)

    def __call__(self, outputs: Outputs, micro_batch: MicroBatch) -> Tensor:
        """See `LossOf`."""
        value = self._loss(outputs, micro_batch)
        self._context.metrics.total(metric_name(self._context, "loss"), value.detach() / self._num_updates)
        entropies = outputs.entropies.detach() if isinstance(outputs, TokenOutputs) else value.new_empty(0)
        counted = torch.stack([value.detach(), entropies.sum(), value.new_tensor(len(entropies))])
        self._totals = self._totals.to(value.device) + counted
        return value

    def passes(
        self, backward: Callable[[Sequence[MicroBatch], LossOf[Outputs]], None]
    ) -> Callable[[Sequence[MicroBatch]], None]:
        """Function that adds the gradient of this loss for some micro-batches."""
        return lambda micro_batches: backward(micro_batches, self)

    def undo(self, engine: Trainable) -> None:
        """Undo passes that ran out of memory: their metrics and their gradient."""
        self._context.metrics.go_back_to(self._metrics)
        self._totals = torch.zeros_like(self._totals)
        engine.discard_gradient()

    def over_all_ranks(self) -> tuple[float, float | None]:
        """The loss and the mean entropy of a token; None without one."""
        loss, entropy, count = self._context.sum(self._totals.cpu()).tolist()
        return loss, entropy / count if count else None


def _mini_batches(batch: Batch, context: StageContext) -> Iterator[Tensor]:
    """[n] bool for each update: this rank's rows of its mini-batch.

    Which prompts share an update depends on their ids alone, not on ranks or on the role that is trained.
    """
    groups = torch.unique(context.gather(torch.unique(batch.group_ids)))
    place = torch.searchsorted(groups, batch.group_ids)
    num_updates = context.recipe.batch.updates_per_step
    part = place * num_updates // max(1, len(groups))
    for number in range(num_updates):
        yield part == number


def metric_name(context: StageContext, measure: str) -> str:
    """Name of a metric of the node's role, such as `policy/loss`."""
    return f"{context.node.node.role}/{measure}"


def take(values: Tensor, micro_batch: MicroBatch, like: Tensor) -> Tensor:
    """A column of response tokens in the order of a micro-batch, on the device of `like`."""
    return values[micro_batch.response_index].to(like.device)
