"""The optimizer updates made from one step's samples, for any model and loss.

Guards check the loss, gradient and entropy of an update, and may prevent it. All of their numbers are sums over the
ranks of the node, so every rank reaches the same decision without further communication. Their memory is part of the
node's state, which is checkpointed and restored by a roll-back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless import algorithms
from leaderless.algorithms import Aggregation, Denominators, repeat_per_token, settings, token_weights
from leaderless.config.run import GuardAction, GuardsConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer.row_agreement import select
from leaderless.models.uploads import placed
from leaderless.observability.events import LOWER_BOUNDS, strongest
from leaderless.observability.metrics import Mean, Share, Weights
from leaderless.planner.assign.balance import first_places, parts_of
from leaderless.stages.context import StageContext
from leaderless.stages.episodes import Counted
from leaderless.training.engine import BodyTrainable, Trainable, UpdateInfo
from leaderless.training.micro_batches import MicroBatch, response_lengths
from leaderless.training.routed_experts import RoutedEngine

NORM_WINDOW = 50
"""Number of past gradient norms that a new one is compared with."""
MIN_NORMS = 5
"""Least number of past norms for a comparison."""
EFFECTIVE_SAMPLES = "mismatch/effective_samples"
"""Metric of how far an engine's policy is from the trainer's."""
STEPS_BETWEEN_WARNINGS = 20
"""Steps after a warning of too few effective samples in which there is no other one: it seldom passes by itself."""
_WARNED = "guard/effective_samples_warned"
_SKIPPED, _IN_A_ROW = "guard/skipped", "guard/skipped_in_a_row"
_SILENT = "updates_without_signal"
_NORM, _NUM_NORMS = "guard/norm/", "guard/num_norms"


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
    longest = context.recipe.rollout.max_response_tokens
    for number, mine in parts_of_step(batch, context):
        rows, chosen = batch.select(mine), counted.select(mine)
        counts = response_lengths(rows.jagged("response_mask")), chosen.is_counted
        totals = Denominators(*context.sum(Denominators.count(*counts, chosen.episodes)).tolist())
        weights = token_weights(aggregation, *counts, totals, chosen.episodes, norm_tokens=longest)
        yield MiniBatch(number, rows, weights)


def parts_of_step(batch: Batch, context: StageContext) -> Iterator[tuple[int, Tensor]]:
    """The numbers of a step's updates, from 1, and [n] bool, which rows are a part of each.

    The groups of all ranks are cut into parts of even number by their ids alone. The ranks call it together; a group
    may be on several of them.
    """
    config, group_ids = context.recipe.batch, batch.group_ids
    num_parts, part = config.parts_per_step, torch.zeros_like(group_ids)
    if num_parts > 1:
        mine, what = group_ids.numpy(), f"the groups of node '{context.node.name}'"
        _, borders = select(context.process_group, mine, partial(first_places, num_parts=num_parts), what)
        part = torch.from_numpy(parts_of(mine, borders))
    for number in range(config.updates_per_step):
        yield number + 1, part == number % num_parts


class Loss(NamedTuple):
    """The loss of a micro-batch: a share of its mini-batch's loss, which is the sum over micro-batches and ranks.

    Attributes:
        value: [] float32, with gradient.
        scores: [R] float32, outputs of the model from which it was computed.
        metrics: Shares of the numbers to report, by name.
    """

    value: Tensor
    scores: Tensor
    metrics: Mapping[str, Share]


class OptimizerUpdate:
    """An optimizer update on a mini-batch.

        update = OptimizerUpdate(engine, mini_batch, context)
        for micro_batch in update:
            with update.passes.memory():
                update.backward(loss_of(micro_batch))
        update.step()

    The gradients of micro-batches add up. Where memory runs out, they are discarded, and smaller micro-batches follow.

    Attributes:
        passes: Passes of the micro-batches; see `Passes.memory`.
    """

    def __init__(self, engine: Trainable, mini_batch: MiniBatch, context: StageContext) -> None:
        self._engine, self._mini_batch, self._context = engine, mini_batch, context
        self.passes = engine.passes(mini_batch.rows)
        self._done: list[tuple[Tensor, Mapping[str, Share]]] = []

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches."""
        coefficient = self._context.recipe.algorithm.expert_balance
        if coefficient and isinstance(self._engine, RoutedEngine):
            self._engine.balance_experts(self._mini_batch.rows, coefficient)
        for micro_batch in self.passes:
            if self.passes.number == 1:
                self._engine.discard_gradient()
                self._done.clear()
            yield micro_batch

    def backward(self, loss: Loss) -> None:
        """Add the gradient of a micro-batch; nothing else may keep its loss, which keeps all that was computed."""
        # Even a loss that depends on no output takes part in every collective of the backward pass.
        (loss.value + 0.0 * loss.scores.sum()).backward()  # type: ignore[no-untyped-call]
        self._done.append((loss.value.detach(), {name: share.detach() for name, share in loss.metrics.items()}))

    def step(self) -> None:
        """Change the weights unless a guard prevents it, and report the numbers of the update."""
        context, engine = self._context, self._engine
        num_updates = context.recipe.batch.updates_per_step
        entropy_name = metric_name(context, "entropy")
        sums: Tensor | None = None
        for value, metrics in self._done:
            context.metrics.add(metrics)
            context.metrics.total(metric_name(context, "loss"), value / num_updates)
            entropy, ratios = metrics.get(entropy_name), metrics.get(EFFECTIVE_SAMPLES)  # a critic has neither
            numbers = [entropy.total, entropy.count] if isinstance(entropy, Mean) else [0.0, 0.0]
            numbers += [ratios.total, ratios.square, ratios.count] if isinstance(ratios, Weights) else [0.0, 0.0, 0.0]
            # A number of the host is written by the device, since a copy would wait for it.
            parts = (one.to(value) if isinstance(one, Tensor) else value.new_full((), one) for one in (value, *numbers))
            total = torch.stack([*parts])
            sums = total if sums is None else sums + total
        report_expert_loads(engine, context)
        loss, *more = context.sum(torch.zeros(6) if sums is None else sums.cpu()).tolist()
        info = guarded_step(engine, context, loss, GuardedNumbers.of(more))
        context.metrics.max(metric_name(context, "grad_norm"), info.grad_norm)
        context.metrics.max(metric_name(context, "learning_rate"), info.learning_rate)
        context.progress(self._mini_batch.number / num_updates)


def report_expert_loads(engine: Trainable, context: StageContext) -> None:
    """Report how even the loads of an update were, whose gradient has been added up."""
    loads = engine.expert_loads() if isinstance(engine, RoutedEngine) else None
    if loads is None or not bool(loads[0].any()):
        return
    shares, probabilities = (one / one.sum(1, keepdim=True) for one in loads.double())
    num_experts = shares.shape[1]
    entropy = -(shares * shares.clamp(min=1e-30).log()).sum(1) / math.log(max(2, num_experts))
    numbers = {
        "expert_entropy": entropy.mean(),
        "expert_peak": shares.amax(1).mean() * num_experts,
        "expert_balance": (shares * probabilities).sum(1).mean() * num_experts,
    }
    for name, value in numbers.items():
        context.metrics.mean(f"{context.node.node.role}/{name}", value, 1)


class Breach(NamedTuple):
    """A guard whose condition is violated; see `StageContext.report_event`."""

    guard: str
    value: float
    limit: float | None
    action: GuardAction


class GuardedNumbers(NamedTuple):
    """Numbers of a mini-batch over all ranks that guards look at; None for a model or a loss that has none.

    Attributes:
        entropy: Mean entropy of the tokens that count.
        effective_samples: Effective sample size of the ratios between trainer and engine, as a share of these tokens.
    """

    entropy: float | None = None
    effective_samples: float | None = None

    @classmethod
    def of(cls, sums: Sequence[float]) -> GuardedNumbers:
        """The numbers, of sums over all ranks: entropies, their count; ratios, their squares, their count."""
        entropies, count, ratios, squares, num_ratios = sums
        return cls(entropies / count if count else None, ratios**2 / (num_ratios * squares) if squares else None)


NOTHING = GuardedNumbers()


def find_breaches(
    config: GuardsConfig,
    loss: float,
    grad_norm: float,
    watched: GuardedNumbers = NOTHING,
    usual_norm: float | None = None,
) -> list[Breach]:
    """The guards that an update violates, given its numbers over all ranks before it is made.

    The norm is taken before clipping; the usual one is the median of earlier updates, or None while there are too few.
    """
    times_usual = grad_norm / usual_norm if usual_norm else None
    bounds: tuple[tuple[str, float | None, float | None, GuardAction], ...] = (
        ("grad_norm_limit", grad_norm, config.grad_norm_limit, config.grad_norm_action),
        ("grad_norm_factor", times_usual, config.grad_norm_factor, config.grad_norm_action),
        ("entropy_limit", watched.entropy, config.entropy_limit, config.entropy_action),
        (
            "effective_samples_limit",
            watched.effective_samples,
            config.effective_samples_limit,
            config.effective_samples_action,
        ),
    )
    breaches = []
    if not math.isfinite(loss):
        breaches.append(Breach("non_finite_loss", loss, None, config.non_finite_loss))
    if not math.isfinite(grad_norm):
        breaches.append(Breach("non_finite_gradient", grad_norm, None, config.non_finite_gradient))
    for guard, value, limit, action in bounds:
        if value is None or limit is None or not math.isfinite(value):
            continue
        if value < limit if guard in LOWER_BOUNDS else value > limit:
            breaches.append(Breach(guard, value, limit, action))
    return breaches


def guarded_step(engine: Trainable, context: StageContext, loss: float, watched: GuardedNumbers) -> UpdateInfo:
    """Make an optimizer update unless its gradient is 0 or a guard prevents it, and report what guards found.

    All ranks of the node call it together, with the loss of the mini-batch over all of them and its other numbers.
    """
    config, state = context.recipe.guards, context.state
    norms = [value for name, value in state.items() if name.startswith(_NORM)]
    usual_norm = statistics.median(norms) if len(norms) >= MIN_NORMS else None
    breaches: list[Breach] = []

    def allow(grad_norm: float) -> bool:
        breaches.extend(find_breaches(config, loss, grad_norm, watched, usual_norm))
        # Without a gradient, momentum and weight decay alone would change the weights.
        return grad_norm != 0 and all(breach.action == "warn" for breach in breaches)

    info = engine.optimizer_step(allow)
    if info.is_made:
        state.pop(_IN_A_ROW, None)
        if config.grad_norm_factor is not None:
            count = int(state.get(_NUM_NORMS, 0))
            state[f"{_NORM}{count % NORM_WINDOW}"] = info.grad_norm
            state[_NUM_NORMS] = count + 1
    elif strongest(breach.action for breach in breaches) == "skip":
        for name in (_SKIPPED, _IN_A_ROW):
            state[name] = state.get(name, 0.0) + 1
        num_updates = context.recipe.steps * context.recipe.batch.updates_per_step
        if state[_IN_A_ROW] > config.max_skips or state[_IN_A_ROW] == num_updates:
            breaches.append(Breach("max_skips", state[_IN_A_ROW], config.max_skips, "stop"))
    elif info.grad_norm == 0:
        state[_SILENT] = state.get(_SILENT, 0.0) + 1
        context.metrics.max(metric_name(context, _SILENT), state[_SILENT])
    for breach in breaches:
        if not _is_repeated(breach, context):
            context.report_event(*breach)
    if state.get(_SKIPPED):
        context.metrics.max(f"guard/skipped/{context.node.node.role}", state[_SKIPPED])
    return info


def _is_repeated(breach: Breach, context: StageContext) -> bool:
    """Whether a breach is one more warning of what the user has been warned of a few steps ago."""
    if (breach.guard, breach.action) != ("effective_samples_limit", "warn"):
        return False
    before = context.state.get(_WARNED)
    if before is not None and 0 <= context.step - before < STEPS_BETWEEN_WARNINGS:
        return True
    context.state[_WARNED] = float(context.step)
    return False


def add_states(engine: Trainable, batch: Batch, before: int, context: StageContext) -> None:
    """Let a model of a body know which states a step has shown.

    Args:
        engine: Engine that was trained.
        batch: This rank's episodes.
        before: Version before the updates; if no update was made, weights of a version must stay as they are.
        context: Context of the node.
    """
    if isinstance(engine, BodyTrainable) and engine.policy_version != before:
        engine.add_states(batch, context.sum)


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
    """Values of tokens, [total, ...], with 0 for tokens that do not count, [total] bool."""
    return torch.where(is_counted.view(-1, *[1] * (values.ndim - 1)), values, values.new_zeros(()))


KL_STATE = "kl_coefficient"
"""Name, in the state of a node, of the weight of the KL penalty."""


def token_columns(rows: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Columns as a loss gets them, [total, ...] each: the value of a sample stands at each of its response tokens.

    Raises:
        ValueError: A column has neither one value for each sample nor one for each response token.
    """
    lengths, found = rows.jagged("advantages").lengths, {}
    for name in names:
        match rows[name]:
            case Tensor() as values:
                found[name] = repeat_per_token(values, lengths)
            case Jagged(values=values, axis="response_tokens"):
                found[name] = values
            case _:
                raise ValueError(
                    f"column '{name}' has neither one value for each sample nor one for each response token, so a loss "
                    "cannot read it: compute such a column in a stage of the workflow, and read that"
                )
    return found


def correction_weights(config: settings.CorrectionConfig, old: Tensor, rollout: Tensor, lengths: Tensor) -> Tensor:
    """[total]: the weight of each token that corrects for its having been sampled by another policy.

    The log-probabilities, [total], are the trainer's before this step's updates and the engine's at sampling time;
    `lengths`, [n] int64, are the response tokens of each sample.
    """
    if not config.has_weights:
        return torch.ones_like(old)
    ratios = algorithms.importance_ratios(old, rollout, lengths, config.level)
    match config.type:
        case "truncate":
            return algorithms.truncated_weights(ratios, highest=config.highest)
        case "mask":
            return algorithms.masked_weights(ratios, lowest=config.lowest, highest=config.highest)
        case _:
            return algorithms.is_within(ratios, config.lowest, config.highest).to(ratios.dtype)


def kl_coefficient(context: StageContext) -> float:
    """The weight of the KL penalty in this step, from the state of the node that applies it."""
    return context.state.get(KL_STATE, context.recipe.algorithm.kl.coefficient)


def adapt_kl_coefficient(context: StageContext, total: Tensor, num_tokens: int, num_episodes: int) -> None:
    """Adapt the weight of the KL penalty for the next step, if there is a target and the policy is trained in this one.

    While only the critic is trained, the divergence does not respond to the weight: adapting it would drive it further
    away with each step of the warm-up. `total` is the sum of the divergence over this rank's tokens; both numbers are
    this rank's too.
    """
    algorithm, coefficient = context.recipe.algorithm, kl_coefficient(context)
    config = algorithm.kl
    if config.target is None:
        return
    context.metrics.max("policy/kl_coefficient", coefficient)
    if context.step <= algorithm.critic.warmup_steps:
        return
    divergence, tokens, count = context.sum(torch.tensor([float(total), num_tokens, num_episodes]).double()).tolist()
    if not math.isfinite(divergence):
        return  # guards decide what happens to the step
    context.state[KL_STATE] = algorithms.adapted_coefficient(
        coefficient,
        divergence / max(tokens, 1),
        target=config.target,
        horizon=config.horizon,
        num_episodes=int(count),
    )
