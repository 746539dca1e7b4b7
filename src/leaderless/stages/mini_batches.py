"""The optimiser steps that are made from one step's samples, whatever the model and its loss."""

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
"""Makes the loss of a mini-batch, given the weight of each of its response tokens and its number, from 1."""


def train_mini_batches(
    batch: Batch,
    is_counted: Tensor,
    context: StageContext,
    engine: Trainable,
    aggregation: Aggregation,
    make_loss: LossOfBatch[Outputs],
    backward: Callable[[Sequence[MicroBatch], LossOf[Outputs]], None],
) -> None:
    """Make `batch.updates_per_step` optimiser steps, each on its share of the prompts.

    Args:
        batch: Samples, or rows to imitate.
        is_counted: [n] bool; what does not count carries no gradient.
        context: Of the node.
        engine: Is trained.
        aggregation: How the losses of tokens become one number.
        make_loss: Of each mini-batch.
        backward: Adds the gradient of a loss to what the engine has.
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
    """Samples that carry a gradient: their reward did not fail, and `algorithm.overlong.filter` leaves them in.

    Args:
        batch: Samples with `reward_valid`, and with `truncated` where the filter is set.
        context: Context of the node.

    Returns:
        [n] bool.
    """
    is_valid = batch.dense("reward_valid")
    return is_valid & ~batch.dense("truncated") if context.recipe.algorithm.overlong.filter else is_valid


class _Tally(Generic[Outputs]):
    """The loss of a mini-batch, which is added up as its micro-batches go by, and the entropy with it."""

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
        """What adds the gradient of this loss to what an engine has."""
        return lambda micro_batches: backward(micro_batches, self)

    def undo(self, engine: Trainable) -> None:
        """Take back passes that ran out of memory: what they reported, and their gradient."""
        self._context.metrics.go_back_to(self._metrics)
        self._totals = torch.zeros_like(self._totals)
        engine.discard_gradient()

    def over_all_ranks(self) -> tuple[float, float | None]:
        """The loss, and the mean entropy of a token; None without one."""
        loss, entropy, count = self._context.sum(self._totals.cpu()).tolist()
        return loss, entropy / count if count else None


def _mini_batches(batch: Batch, context: StageContext) -> Iterator[Tensor]:
    """[n] bool for each update: this rank's rows of its mini-batch.

    Which prompts share an update follows from their ids alone, whatever rank their samples are on and whichever role is
    trained.
    """
    groups = torch.unique(context.gather(torch.unique(batch.group_ids)))
    place = torch.searchsorted(groups, batch.group_ids)
    num_updates = context.recipe.batch.updates_per_step
    part = place * num_updates // max(1, len(groups))
    for number in range(num_updates):
        yield part == number


def metric_name(context: StageContext, measure: str) -> str:
    """A metric of the role that is trained, as `policy/loss`.

    Args:
        context: Of the node that trains it.
        measure: What is measured.
    """
    return f"{context.node.node.role}/{measure}"


def take(values: Tensor, micro_batch: MicroBatch, like: Tensor) -> Tensor:
    """A column of response tokens, as a micro-batch orders them.

    Args:
        values: [total].
        micro_batch: Of the batch that has the column.
        like: On the device that is wanted.
    """
    return values[micro_batch.response_index].to(like.device)
