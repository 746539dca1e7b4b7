"""The optimizer updates made from one step's samples, for any model and loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from leaderless.algorithms import Aggregation, Denominators, token_weights
from leaderless.data.batch import Batch
from leaderless.models.uploads import placed
from leaderless.observability.metrics import Mean, Share
from leaderless.stages import experts
from leaderless.stages.context import StageContext
from leaderless.stages.episodes import Counted
from leaderless.stages.guards import guarded_step
from leaderless.training.engine import BodyTrainable, Trainable
from leaderless.training.micro_batches import MicroBatch, response_lengths


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
    batch: Batch, counted: Counted, aggregation: Aggregation, context: StageContext
) -> Iterator[MiniBatch]:
    """Divide a step's prompts between the updates of an epoch, of which there are `batch.epochs_per_step`.

    Which prompts share an update depends on their ids alone, not on ranks or on the role that is trained. Rows that do
    not count carry no gradient; the aggregation turns the losses of tokens into one number.
    """
    config, longest = context.recipe.batch, context.recipe.rollout.max_response_tokens
    part = context.parts_of(batch.group_ids, config.parts_per_step)
    for number in range(config.updates_per_step):
        mine = part == number % config.parts_per_step
        rows, chosen = batch.select(mine), counted.select(mine)
        counts = response_lengths(rows.jagged("response_mask")), chosen.is_counted
        totals = Denominators(*context.sum(Denominators.count(*counts, chosen.episodes)).tolist())
        weights = token_weights(aggregation, *counts, totals, chosen.episodes, norm_tokens=longest)
        yield MiniBatch(number + 1, rows, weights)


@dataclass(frozen=True)
class Loss:
    """The loss of a micro-batch: a share of that of its mini-batch, which is the sum over micro-batches and ranks.

    Attributes:
        value: [] float32, with gradient.
        scores: [R] float32, outputs of the model from which it was computed.
        metrics: Shares of the numbers to report, by name.
    """

    value: Tensor
    scores: Tensor
    metrics: Mapping[str, Share]


def make_update(
    engine: Trainable, mini_batch: MiniBatch, loss_of: Callable[[MicroBatch], Loss], context: StageContext
) -> None:
    """Make an optimizer update: add up the gradients of all micro-batches, then take the step.

    Args:
        engine: Engine to train.
        mini_batch: Samples of the update.
        loss_of: Function that passes a micro-batch through the engine's model and computes its loss.
        context: Context of the node.
    """
    num_updates = context.recipe.batch.updates_per_step
    experts.balance(engine, mini_batch.rows, context)
    entropy_name = metric_name(context, "entropy")
    sums: Tensor | None = None
    for value, metrics in engine.run_passes(mini_batch.rows, partial(_add_gradients, engine, loss_of)):
        context.metrics.add(metrics)
        context.metrics.total(metric_name(context, "loss"), value / num_updates)
        entropy = metrics.get(entropy_name)
        numbers = (entropy.total, entropy.count) if isinstance(entropy, Mean) else (0.0, 0.0)  # a critic has none
        # A number of the host is written by the device, since a copy would wait for it.
        shares = (one.to(value) if isinstance(one, Tensor) else value.new_full((), one) for one in (value, *numbers))
        total = torch.stack([*shares])
        sums = total if sums is None else sums + total
    experts.report_loads(engine, context)
    loss, entropies, count = context.sum(torch.zeros(3) if sums is None else sums.cpu()).tolist()
    info = guarded_step(engine, context, loss, entropies / count if count else None)
    context.metrics.max(metric_name(context, "grad_norm"), info.grad_norm)
    context.metrics.max(metric_name(context, "learning_rate"), info.learning_rate)
    context.progress(mini_batch.number / num_updates)


def _add_gradients(
    engine: Trainable, loss_of: Callable[[MicroBatch], Loss], micro_batches: Iterable[MicroBatch]
) -> list[tuple[Tensor, Mapping[str, Share]]]:
    """The loss of each micro-batch, after its backward pass, and what is to be reported of it.

    Where memory runs out, this is called again with smaller micro-batches.
    """
    engine.discard_gradient()
    done: list[tuple[Tensor, Mapping[str, Share]]] = []
    for micro_batch in micro_batches:
        loss = loss_of(micro_batch)
        # Even a loss that depends on no output takes part in every collective of the backward pass.
        (loss.value + 0.0 * loss.scores.sum()).backward()  # type: ignore[no-untyped-call]
        done.append((loss.value.detach(), {name: share.detach() for name, share in loss.metrics.items()}))
    return done


def add_states(engine: Trainable, batch: Batch, before: int, context: StageContext) -> None:
    """Let a model of a body know which states a step has shown.

    Args:
        engine: Engine that was trained.
        batch: This rank's episodes.
        before: Version before the updates; if no update was made, weights of a version must stay as they are.
        context: Context of the node.
    """
    if context.recipe.body is not None and engine.policy_version != before:
        cast("BodyTrainable", engine).add_states(batch, context.sum)


def counted_samples(batch: Batch, context: StageContext) -> Tensor:
    """[n] bool: samples that carry a gradient, as their reward is valid and `algorithm.overlong.filter` keeps them."""
    is_valid = batch.dense("reward_valid")
    return is_valid & ~batch.dense("truncated") if context.recipe.algorithm.overlong.filter else is_valid


def metric_name(context: StageContext, measure: str) -> str:
    """Name of a metric of the node's role, such as `policy/loss`."""
    return f"{context.node.node.role}/{measure}"


def take(values: Tensor, micro_batch: MicroBatch, like: Tensor) -> Tensor:
    """A column of response tokens in the order of a micro-batch, on the device of `like`; see `placed`."""
    return placed(values[micro_batch.response_index], like.device)


def only(values: Tensor, is_counted: Tensor) -> Tensor:
    """Values of tokens, [total, ...], with 0 in place of those of tokens that do not count, [total] bool."""
    return torch.where(is_counted.view(-1, *[1] * (values.ndim - 1)), values, values.new_zeros(()))
