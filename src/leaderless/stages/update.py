"""The stages that score tokens with language models and critics, and that change their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor

from leaderless.algorithms import (
    ChoiceInputs,
    LossInputs,
    Moments,
    clipped_value_loss,
    importance_ratios,
    interpolated_log_probs,
    kl_penalty,
    repeat_per_token,
)
from leaderless.algorithms.policy_loss import compute
from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.models.scoring import Entropy
from leaderless.models.uploads import one_copy, placed
from leaderless.observability.metrics import Largest, Mean, Share, Weights
from leaderless.rollout.sampling import uniform_noise
from leaderless.stages import losses
from leaderless.stages.context import StageContext
from leaderless.stages.episodes import Counted
from leaderless.stages.mini_batches import (
    Loss,
    MiniBatch,
    add_states,
    counted_samples,
    make_update,
    metric_name,
    mini_batches,
    only,
    take,
)
from leaderless.training.engine import BodyCritic
from leaderless.training.micro_batches import TEMPERATURES, MicroBatch, response_lengths
from leaderless.workflow.ages import AGES, may_be_stale
from leaderless.workflow.stage import has_turn


def log_probs(batch: Batch, context: StageContext) -> Batch:
    """Add the log-probabilities of the sampled tokens under the node's role, at the temperatures of sampling.

    The column is `old_log_probs` for a role that is trained, `ref_log_probs` for the reference, and `<role>_log_probs`
    for any other.
    """
    scores = context.role.train_engine.log_probs(with_temperatures(batch, context))
    (column,) = context.node.writes
    return batch.with_columns({column: scores})


def values(batch: Batch, context: StageContext) -> Batch:
    """Add the critic's value before each sampled token, and at the end of an episode of a body."""
    critic = context.critic
    batch = batch.with_columns(values=critic.values(batch))
    if context.recipe.body is None:
        return batch
    return batch.with_columns(final_values=cast("BodyCritic", critic).final_values(batch))


def update(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the policy loss, with the recipe's penalties and corrections.

    Raises:
        RuntimeError: A token was drawn with other weights than those about to be trained, and is no surplus.
    """
    engine, algorithm = context.role.train_engine, context.recipe.algorithm
    _check_versions(batch, context)
    _report_size(batch, context)
    before = engine.policy_version
    if context.step <= algorithm.critic.warmup_steps or not has_turn(context.recipe, context.node.node, context.step):
        return batch
    counted = Counted.of(batch, counted_samples(batch, context), context)
    for mini_batch in mini_batches(with_temperatures(batch, context), counted, algorithm.aggregation, context):
        own = losses.token_columns(mini_batch.rows, algorithm.policy_loss.reads)
        loss_of = partial(_policy_gradient_loss, context, mini_batch, own, _choose(mini_batch, context), before)
        make_update(engine, mini_batch, loss_of, context)
    add_states(engine, batch, before, context)
    if algorithm.is_penalized_in_loss:
        sampled = batch.jagged("rollout_log_probs")
        divergence = kl_penalty(sampled.values, batch.jagged("ref_log_probs").values, algorithm.kl.estimator)
        divergence = divergence[repeat_per_token(counted.is_counted, sampled.lengths)]
        losses.adapt_kl_coefficient(context, divergence.sum(), len(divergence), counted.num_episodes)
    return batch


def with_temperatures(batch: Batch, context: StageContext) -> Batch:
    """The batch with the temperature of each sampled token: the recipe's, where the rollout has not written any."""
    if TEMPERATURES in batch:
        return batch
    lengths = response_lengths(batch.jagged("response_mask"))
    values = torch.full((int(lengths.sum()),), context.recipe.rollout.temperature)
    return batch.with_columns({TEMPERATURES: Jagged(values, lengths, "response_tokens")})


def _check_versions(batch: Batch, context: StageContext) -> None:
    """Each token must come from the weights about to be trained, or be as old as surplus may be."""
    version, limit = context.role.train_engine.policy_version, context.node.max_staleness
    versions = batch.jagged("policy_versions")
    staleness = version - versions.values
    wrong = (staleness < 0) | (staleness > limit)
    if bool(wrong.any()):
        sample = repeat_per_token(batch.ids, versions.lengths)[wrong][0]
        raise RuntimeError(
            f"node '{context.node.name}', rank {context.process_group.rank}, step {context.step}: a token of sample "
            f"{int(sample)} was drawn by policy version {int(versions.values[wrong][0])}, "
            f"but version {version} is trained"
            + (f" and a token may be {limit} behind" if limit else "")
            + ": the rollout did not get the new weights"
        )
    context.metrics.mean("rollout/staleness", staleness.sum(), len(staleness))
    if may_be_stale(context.recipe):
        _report_ages(staleness, versions.lengths, context)


def _report_ages(staleness: Tensor, lengths: Tensor, context: StageContext) -> None:
    """Report how old the oldest token of each sample is, in updates; `staleness` is [total], `lengths` [n]."""
    has_tokens = lengths > 0
    oldest = staleness.double()
    if bool(has_tokens.any()):  # all episodes of a rank may have failed
        oldest = torch.segment_reduce(oldest, "max", lengths=lengths[has_tokens])
    context.metrics.mean("staleness/oldest", oldest.sum(), len(oldest))
    for name, is_inside in ages_of(oldest):
        context.metrics.mean(f"staleness/share/{name}", is_inside.sum(), len(oldest))


def ages_of(staleness: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Which values, [n], lie in each range of ages, [n] bool, by the name of the range."""
    for name, (first, last) in AGES.items():
        yield name, (staleness >= first) & (staleness <= last)


def _choose(mini_batch: MiniBatch, context: StageContext) -> Tensor:
    """[total] bool: tokens that the loss treats differently, among those that count; none for most losses."""
    recipe, rows, is_counted = context.recipe, mini_batch.rows, mini_batch.weights > 0
    is_chosen = torch.zeros_like(is_counted)
    loss = recipe.algorithm.policy_loss
    if not loss.chooses_tokens:
        return is_chosen
    advantages = rows.jagged("advantages")
    if mini_batch.number == 1 and "old_log_probs" in rows:
        scores = rows.jagged("old_log_probs")
    else:
        scores = context.role.train_engine.log_probs(rows)
    positions = ragged_index(torch.zeros_like(advantages.lengths), advantages.lengths)
    # Independent of the noise that sampled the tokens.
    noise = uniform_noise(recipe.seed + context.step * 2**32, repeat_per_token(rows.ids, advantages.lengths), positions)
    columns = (scores.values[is_counted], advantages.values[is_counted], noise[is_counted])
    is_chosen[is_counted] = loss.choose(ChoiceInputs(*columns, context.sum))
    return is_chosen


def _policy_gradient_loss(
    context: StageContext,
    mini_batch: MiniBatch,
    own: Mapping[str, Tensor],
    is_chosen: Tensor,
    before: int,
    micro_batch: MicroBatch,
) -> Loss:
    """The policy loss of a micro-batch, with its penalties.

    `own` are the columns that the loss itself reads, and `before` is the version before this step's updates.
    """
    config, metrics = context.recipe.algorithm, dict[str, Share]()
    entropy: Entropy = "gradient" if config.entropy_coefficient > 0 else "value"
    outputs = context.role.train_engine.forward(micro_batch, entropy)
    rows, names = mini_batch.rows, ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
    taken = partial(take, micro_batch=micro_batch, like=outputs.log_probs)
    with one_copy(outputs.log_probs.device):
        weights, chosen = taken(mini_batch.weights), taken(is_chosen)
        found = {name: taken(rows.jagged(name).values) for name in names if name in rows}
        own = {name: taken(values) for name, values in own.items()}
        versions = taken(rows.jagged("policy_versions").values)
        lengths = placed(micro_batch.response_lengths, outputs.log_probs.device)
    is_counted = weights > 0
    # Replace the values of tokens that do not count before computing with them: 0 times NaN is NaN.
    new = torch.where(is_counted, outputs.log_probs, 0.0)
    columns = {name: torch.where(is_counted, values, 0.0) for name, values in found.items()}
    # Without other updates in the step, the policy before them is the policy itself.
    old = columns.get("old_log_probs", new.detach())
    if config.proximal == "interpolated":
        now = context.role.train_engine.policy_version
        old = interpolated_log_probs(new, columns["rollout_log_probs"], versions, before=before, now=now)
    inputs = LossInputs(
        log_probs=new,
        old_log_probs=old,
        advantages=columns["advantages"],
        lengths=lengths,
        is_counted=is_counted,
        is_chosen=chosen,
        columns={name: only(values, is_counted) for name, values in own.items()},
        step=context.step,
    )
    policy = compute(config.policy_loss, inputs)
    correction = losses.correction_weights(config.correction, old, columns["rollout_log_probs"], lengths)
    loss = correction * policy.loss

    report = partial(_mean_of, is_counted=is_counted)
    if config.is_penalized_in_loss:
        kl, reference = config.kl, columns["ref_log_probs"]
        penalty = kl_penalty(new, reference, kl.estimator, unbiased_gradient=kl.unbiased_gradient)
        loss = loss + losses.kl_coefficient(context) * penalty
        metrics[metric_name(context, "kl")] = report(penalty.detach())
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * torch.where(is_counted, outputs.entropies, 0.0)
    metrics[metric_name(context, "clip_fraction")] = report(policy.is_clipped)
    metrics[metric_name(context, "entropy")] = report(outputs.entropies.detach())
    for name, values in policy.metrics.items():
        metrics[metric_name(context, name)] = report(values.detach())
    if config.correction.type != "none":
        metrics["correction/weight"] = report(correction)
        metrics["correction/dropped"] = report(correction == 0)
    metrics |= _mismatch(columns["rollout_log_probs"], old, is_counted)
    if may_be_stale(context.recipe):
        metrics |= _mismatch_by_age(columns["rollout_log_probs"], old, before - versions, is_counted)
        ratios = importance_ratios(old, columns["rollout_log_probs"], lengths, "token")
        metrics["mismatch/effective_samples"] = Weights.of(ratios, is_counted)
    return Loss((weights * loss).sum(), outputs.log_probs, metrics)


def _mismatch(rollout_log_probs: Tensor, old_log_probs: Tensor, is_counted: Tensor) -> dict[str, Share]:
    """Distance between the engine's log-probabilities and the trainer's before this step's updates."""
    difference = rollout_log_probs - old_log_probs
    return {
        "mismatch/abs_mean": _mean_of(difference.abs(), is_counted),
        "mismatch/abs_max": Largest(difference.abs().max() if len(difference) else 0.0),
        "mismatch/kl": _mean_of(difference, is_counted),
    }


def _mismatch_by_age(
    rollout_log_probs: Tensor, old_log_probs: Tensor, ages: Tensor, is_counted: Tensor
) -> dict[str, Share]:
    """The same, for tokens of similar ages."""
    difference = rollout_log_probs - old_log_probs
    groups = ages_of(ages)
    return {f"mismatch/kl_by_age/{name}": _mean_of(difference, is_counted & is_inside) for name, is_inside in groups}


def _mean_of(values: Tensor, is_counted: Tensor) -> Mean:
    """The mean over the tokens that count."""
    return Mean(torch.where(is_counted, values, 0).sum(), is_counted.sum())


def sft(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the negative log-likelihood of the given responses."""
    engine = context.role.train_engine
    counted = Counted.of(batch, torch.ones(len(batch), dtype=torch.bool), context)
    _report_size(batch, context)
    before = engine.policy_version
    for mini_batch in mini_batches(batch, counted, context.recipe.algorithm.aggregation, context):
        make_update(engine, mini_batch, partial(_imitation_loss, context, mini_batch), context)
    add_states(engine, batch, before, context)
    return batch


def _imitation_loss(context: StageContext, mini_batch: MiniBatch, micro_batch: MicroBatch) -> Loss:
    """The negative log-likelihood of a micro-batch."""
    outputs = context.role.train_engine.forward(micro_batch)
    loss = -(take(mini_batch.weights, micro_batch, outputs.log_probs) * outputs.log_probs).sum()
    entropy = Mean(outputs.entropies.sum(), len(outputs.entropies))
    return Loss(loss, outputs.log_probs, {metric_name(context, "entropy"): entropy})


def update_critic(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the clipped squared error, averaged over tokens.

    Mini-batches, and the samples that carry a gradient, are the same as for the policy.
    """
    engine, counted = context.critic, Counted.of(batch, counted_samples(batch, context), context)
    _report_fit(batch, counted.is_counted, context)
    before = engine.policy_version
    for mini_batch in mini_batches(batch, counted, "token_mean", context):
        make_update(engine, mini_batch, partial(_value_loss, context, mini_batch), context)
    add_states(engine, batch, before, context)
    return batch


def _value_loss(context: StageContext, mini_batch: MiniBatch, micro_batch: MicroBatch) -> Loss:
    """The value loss of a micro-batch."""
    outputs = context.critic.forward(micro_batch)
    with one_copy(outputs.device):
        weights, *found = (
            take(values, micro_batch, outputs)
            for values in (mini_batch.weights, *(mini_batch.rows.jagged(name).values for name in ("values", "returns")))
        )
    is_counted = weights > 0
    # Replace the values of tokens that do not count before computing with them: 0 times NaN is NaN.
    old, returns = (torch.where(is_counted, values, outputs.detach()) for values in found)
    loss = clipped_value_loss(outputs, old, returns, clip=context.recipe.algorithm.critic.value_clip or math.inf)
    is_clipped = Mean((loss.is_clipped & is_counted).sum(), is_counted.sum())
    return Loss((weights * loss.loss).sum(), outputs, {metric_name(context, "clip_fraction"): is_clipped})


def _report_fit(batch: Batch, is_counted: Tensor, context: StageContext) -> None:
    """Report how good the critic was before the updates: 1 - Var(returns - values) / Var(returns), over all ranks."""
    expected, returns = batch.jagged("values"), batch.jagged("returns").values
    counts = repeat_per_token(is_counted, expected.lengths)
    context.metrics.mean(metric_name(context, "value_mean"), expected.values[counts].sum(), counts.sum())
    left = Moments.of(context.sum(Moments.count(returns - expected.values, counts)))
    whole = Moments.of(context.sum(Moments.count(returns, counts)))
    if whole.std > 0:
        context.metrics.max(metric_name(context, "explained_variance"), 1 - (left.std / whole.std) ** 2)


def _report_size(batch: Batch, context: StageContext) -> None:
    """Count the tokens of the step's samples."""
    count = batch.jagged("prompt_tokens").lengths.sum() + batch.jagged("tokens").lengths.sum()
    context.metrics.total("throughput/tokens", count)
