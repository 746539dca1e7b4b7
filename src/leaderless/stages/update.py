"""The stages that score tokens with language models and critics, and that change their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple, cast

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
from leaderless.planner.workflow.stage_spec import AGES, has_turn, may_be_stale
from leaderless.rollout.native.sampling import uniform_noise
from leaderless.stages.context import StageContext
from leaderless.stages.episodes import Counted
from leaderless.stages.mini_batches import (
    EFFECTIVE_SAMPLES,
    Loss,
    MiniBatch,
    OptimizerUpdate,
    adapt_kl_coefficient,
    add_states,
    correction_weights,
    counted_samples,
    kl_coefficient,
    metric_name,
    mini_batches,
    only,
    take,
    token_columns,
)
from leaderless.training.engine import BodyCritic
from leaderless.training.micro_batches import TEMPERATURES, MicroBatch, response_lengths


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
    if "final_values" not in context.node.writes:
        return batch
    return batch.with_columns(final_values=cast("BodyCritic", critic).final_values(batch))


def update(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the policy loss, with the recipe's penalties and corrections.

    Raises:
        RuntimeError: A token was drawn with other weights than those about to be trained, and is no surplus.
    """
    engine, algorithm = context.role.train_engine, context.recipe.algorithm
    check_versions(batch, context)
    report_size(batch, context)
    before = engine.policy_version
    if context.step <= algorithm.critic.warmup_steps or not has_turn(context.recipe, context.node.node, context.step):
        return batch
    counted = Counted.of(batch, counted_samples(batch, context), context)
    for mini_batch in mini_batches(with_temperatures(batch, context), counted, algorithm.aggregation, context):
        own = token_columns(mini_batch.rows, algorithm.policy_loss.reads)
        columns = _Columns(mini_batch, own, _choose(mini_batch, own, context), before)
        now = OptimizerUpdate(engine, mini_batch, context)
        for micro_batch in now:
            with now.passes.memory():
                now.backward(_policy_gradient_loss(micro_batch, columns, context))
        now.step()
    add_states(engine, batch, before, context)
    if algorithm.is_penalized_in_loss:
        sampled = batch.jagged("rollout_log_probs")
        divergence = kl_penalty(sampled.values, batch.jagged("ref_log_probs").values, algorithm.kl.estimator)
        divergence = divergence[repeat_per_token(counted.is_counted, sampled.lengths)]
        num_episodes = int((counted.is_counted & counted.episodes.is_first).sum())  # each on one rank only
        adapt_kl_coefficient(context, divergence.sum(), len(divergence), num_episodes)
    return batch


def with_temperatures(batch: Batch, context: StageContext) -> Batch:
    """The batch with the temperature of each sampled token: the recipe's, where the rollout has not written any."""
    if TEMPERATURES in batch:
        return batch
    lengths = response_lengths(batch.jagged("response_mask"))
    values = torch.full((int(lengths.sum()),), context.recipe.rollout.temperature)
    return batch.with_columns({TEMPERATURES: Jagged(values, lengths, "response_tokens")})


def check_versions(batch: Batch, context: StageContext) -> None:
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
    if may_be_stale(context.recipe, context.node.node):
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


def _choose(mini_batch: MiniBatch, own: Mapping[str, Tensor], context: StageContext) -> Tensor:
    """[total] bool: tokens that the loss treats differently, among those that count; none for most losses.

    `own` are the columns that the loss reads, [total, ...] by name.
    """
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
    read = {name: values[is_counted] for name, values in own.items()}
    is_chosen[is_counted] = loss.choose(ChoiceInputs(*columns, context.sum, read))
    return is_chosen


class _Columns(NamedTuple):
    """Columns of the response tokens of a mini-batch.

    Attributes:
        mini_batch: Samples, and the weight of each token.
        own: Columns that the policy loss itself reads, [total, ...] by name.
        is_chosen: [total] bool, tokens that it treats differently.
        before: Policy version before this step's updates.
    """

    mini_batch: MiniBatch
    own: Mapping[str, Tensor]
    is_chosen: Tensor
    before: int


def _policy_gradient_loss(micro_batch: MicroBatch, columns: _Columns, context: StageContext) -> Loss:
    """Pass a micro-batch through the policy, and compute its loss.

    The loss of a token has three terms: the policy loss, corrected for the policy that sampled the token, the KL
    penalty and the entropy bonus. Its weight has the denominators.
    """
    config, name = context.recipe.algorithm, partial(metric_name, context)
    entropy: Entropy = "gradient" if config.entropy_coefficient > 0 else "value"
    outputs = context.role.train_engine.forward(micro_batch, entropy)
    tokens = _tokens_of(micro_batch, columns, outputs.log_probs, context)
    inputs, metrics = tokens.inputs, dict[str, Share]()
    mean = partial(_mean_of, is_counted=inputs.is_counted)

    output = compute(config.policy_loss, inputs)
    correction = correction_weights(config.correction, inputs.old_log_probs, tokens.rollout, inputs.lengths)
    loss = policy = correction * output.loss
    if config.is_penalized_in_loss:
        assert tokens.reference is not None
        is_unbiased = config.kl.unbiased_gradient
        kl = kl_penalty(inputs.log_probs, tokens.reference, config.kl.estimator, unbiased_gradient=is_unbiased)
        loss = policy + kl_coefficient(context) * kl
        metrics[name("kl")] = mean(kl.detach())
    if config.entropy_coefficient:
        bonus = torch.where(inputs.is_counted, outputs.entropies, 0.0)
        loss = loss - config.entropy_coefficient * bonus

    metrics[name("clip_fraction")] = mean(output.is_clipped)
    metrics[name("entropy")] = mean(outputs.entropies.detach())
    metrics |= {name(one): mean(values.detach()) for one, values in output.metrics.items()}
    if config.correction.has_weights:
        metrics["correction/weight"] = mean(correction)
        metrics["correction/dropped"] = mean(correction == 0)
    metrics |= _mismatch(tokens, may_be_stale=may_be_stale(context.recipe, context.node.node))
    return Loss((tokens.weights * loss).sum(), outputs.log_probs, metrics)


class _Tokens(NamedTuple):
    """The response tokens of a micro-batch, on the device; numbers of those that do not count are 0.

    Attributes:
        inputs: Arguments of the policy loss.
        weights: [total] weight of each in the loss.
        rollout: [total] log-probabilities of the engine that sampled them.
        reference: [total] log-probabilities of the reference, if there is one.
        ages: [total] updates between the weights that sampled each and those before this step's updates.
    """

    inputs: LossInputs
    weights: Tensor
    rollout: Tensor
    reference: Tensor | None
    ages: Tensor


def _tokens_of(micro_batch: MicroBatch, columns: _Columns, log_probs: Tensor, context: StageContext) -> _Tokens:
    """The columns of a micro-batch's tokens, whose log-probabilities under the policy are [total], with gradient."""
    rows, names = columns.mini_batch.rows, ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")
    taken = partial(take, micro_batch=micro_batch, like=log_probs)
    with one_copy(log_probs.device):
        weights, is_chosen = taken(columns.mini_batch.weights), taken(columns.is_chosen)
        found = {name: taken(rows.jagged(name).values) for name in names if name in rows}
        own = {name: taken(values) for name, values in columns.own.items()}
        versions = taken(rows.jagged("policy_versions").values)
        lengths = placed(micro_batch.response_lengths, log_probs.device)
    is_counted = weights > 0
    # Replace the values of tokens that do not count before computing with them: 0 times NaN is NaN.
    new = torch.where(is_counted, log_probs, 0.0)
    found = {name: torch.where(is_counted, values, 0.0) for name, values in found.items()}
    # Without other updates in the step, the policy before them is the policy itself.
    old, rollout = found.get("old_log_probs", new.detach()), found["rollout_log_probs"]
    if context.recipe.algorithm.proximal == "interpolated":
        now = context.role.train_engine.policy_version
        old = interpolated_log_probs(new, rollout, versions, before=columns.before, now=now)
    inputs = LossInputs(
        log_probs=new,
        old_log_probs=old,
        advantages=found["advantages"],
        lengths=lengths,
        is_counted=is_counted,
        is_chosen=is_chosen,
        columns={name: only(values, is_counted) for name, values in own.items()},
        step=context.step,
    )
    return _Tokens(inputs, weights, rollout, found.get("ref_log_probs"), columns.before - versions)


def _mismatch(tokens: _Tokens, *, may_be_stale: bool) -> dict[str, Share]:
    """Distance between the engine's log-probabilities and the trainer's before this step's updates."""
    old, is_counted = tokens.inputs.old_log_probs, tokens.inputs.is_counted
    difference = tokens.rollout - old
    ratios = importance_ratios(old, tokens.rollout, tokens.inputs.lengths, "token")
    found: dict[str, Share] = {
        "mismatch/abs_mean": _mean_of(difference.abs(), is_counted),
        "mismatch/abs_max": Largest(difference.abs().max() if len(difference) else 0.0),
        "mismatch/kl": _mean_of(difference, is_counted),
        EFFECTIVE_SAMPLES: Weights.of(ratios, is_counted),
    }
    if may_be_stale:
        for name, is_inside in ages_of(tokens.ages):  # tokens of similar ages
            found[f"mismatch/kl_by_age/{name}"] = _mean_of(difference, is_counted & is_inside)
    return found


def _mean_of(values: Tensor, is_counted: Tensor) -> Mean:
    """The mean over the tokens that count."""
    return Mean(torch.where(is_counted, values, 0).sum(), is_counted.sum())


def sft(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the negative log-likelihood of the given responses."""
    engine = context.role.train_engine
    counted = Counted.of(batch, torch.ones(len(batch), dtype=torch.bool), context)
    report_size(batch, context)
    before = engine.policy_version
    for mini_batch in mini_batches(batch, counted, context.recipe.algorithm.aggregation, context):
        now = OptimizerUpdate(engine, mini_batch, context)
        for micro_batch in now:
            with now.passes.memory():
                now.backward(_imitation_loss(micro_batch, mini_batch, context))
        now.step()
    add_states(engine, batch, before, context)
    return batch


def _imitation_loss(micro_batch: MicroBatch, mini_batch: MiniBatch, context: StageContext) -> Loss:
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
        now = OptimizerUpdate(engine, mini_batch, context)
        for micro_batch in now:
            with now.passes.memory():
                now.backward(_value_loss(micro_batch, mini_batch, context))
        now.step()
    add_states(engine, batch, before, context)
    return batch


def _value_loss(micro_batch: MicroBatch, mini_batch: MiniBatch, context: StageContext) -> Loss:
    """Pass a micro-batch through the critic, and compute its loss."""
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


def report_size(batch: Batch, context: StageContext) -> None:
    """Count the tokens of the step's samples."""
    count = batch.jagged("prompt_tokens").lengths.sum() + batch.jagged("tokens").lengths.sum()
    context.metrics.total("throughput/tokens", count)
