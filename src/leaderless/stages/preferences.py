"""The stages that learn from preferences: a policy, or a reward model, which then rewards responses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.algorithms import repeat_per_token, segment_sum
from leaderless.algorithms.loss_terms import bradley_terry
from leaderless.algorithms.preference_loss import (
    PreferenceInputs,
    PreferenceLoss,
    PreferenceOutput,
    compute_preferences,
)
from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.uploads import one_copy, placed
from leaderless.observability.metrics import Mean, Share
from leaderless.planner.workflow.columns import IMAGES
from leaderless.planner.workflow.reward_stages import REFERENCE_SCORES
from leaderless.planner.workflow.training_stages import SEQUENCE
from leaderless.stages.context import StageContext
from leaderless.stages.mini_batches import Loss, MiniBatch, OptimizerUpdate, metric_name, parts_of_step
from leaderless.training.engine import TrainEngine, ValueEngine
from leaderless.training.micro_batches import SIDES, MicroBatch

FIRST, SECOND = "first_tokens", "second_tokens"


def update_preferences(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the loss of preferences."""
    engine, loss = context.role.train_engine, context.recipe.algorithm.preference_loss
    context.metrics.total("throughput/tokens", num_tokens(batch))
    for number, mine in parts_of_step(batch, context):
        rows = batch.select(mine)
        totals = totals_of(engine, loss, rows, context.sum)
        if loss.data == "singles":
            context.metrics.mean(metric_name(context, "divergence"), totals.divergence.clamp(min=0), 1)
        mini_batch = MiniBatch(number, samples_for(loss, rows), torch.empty(0))
        now = OptimizerUpdate(engine, mini_batch, context)
        for micro_batch in now:
            with now.passes.memory():
                now.backward(_named(loss_of_rows(engine, loss, rows, totals, micro_batch), context))
        now.step()
    return batch


@dataclass(frozen=True)
class Totals:
    """Facts about a mini-batch on all ranks that the loss of a row needs.

    Attributes:
        num_rows: Number of rows.
        num_imitated: Tokens of chosen, or of desirable, responses, at least 1.
        divergence: [] mean log-ratio of policy to reference of the responses of other rows, for single responses.
    """

    num_rows: float
    num_imitated: float
    divergence: Tensor


def totals_of(engine: TrainEngine, loss: PreferenceLoss, rows: Batch, add_up: Callable[[Tensor], Tensor]) -> Totals:
    """The totals of a mini-batch, of which this rank has some rows; `add_up` adds up a tensor over all ranks."""
    lengths, ratios = rows.jagged(FIRST).lengths, torch.zeros(())
    if loss.data == "singles":
        lengths = lengths * rows.dense("desirable")
        scores = engine.log_probs(one_side(rows, SECOND))
        ratios = (segment_sum(scores.values, scores.lengths) - rows.dense(REFERENCE_SCORES)[:, 1]).sum()
    counts = torch.stack([torch.tensor(len(rows)), lengths.sum(), ratios]).double()
    num_rows, num_imitated, ratio = add_up(counts)
    return Totals(float(num_rows), max(float(num_imitated), 1.0), ratio / num_rows.clamp(min=1))


def num_tokens(batch: Batch) -> Tensor:
    """[] tokens of prompts and of both responses to each."""
    return torch.stack([batch.jagged(name).lengths.sum() for name in ("prompt_tokens", FIRST, SECOND)]).sum()


def side_by_side(rows: Batch) -> Batch:
    """Two samples for each row, one after the other: its first and its second response, which share their prompt."""
    sides = torch.arange(2).repeat(len(rows))
    owner = torch.arange(len(rows)).repeat_interleave(2)
    first, second = rows.jagged(FIRST), rows.jagged(SECOND)
    values = torch.cat([first.values, second.values])
    both = Jagged(values, torch.cat([first.lengths, second.lengths]), "tokens").select(owner + sides * len(rows))
    return _samples(rows, both, sides, owner)


def samples_for(loss: PreferenceLoss, rows: Batch) -> Batch:
    """The samples on which a loss is trained."""
    return side_by_side(rows) if loss.data == "pairs" else one_side(rows, FIRST)


def one_side(rows: Batch, column: str) -> Batch:
    """One sample for each row: one of its responses."""
    tokens, owner = rows.jagged(column), torch.arange(len(rows))
    return _samples(rows, Jagged(tokens.values, tokens.lengths, "tokens"), torch.zeros_like(owner), owner)


def _samples(rows: Batch, tokens: Jagged, sides: Tensor, owner: Tensor) -> Batch:
    prompts = rows.only([name for name in ("prompt_tokens", "images") if name in rows])
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    ids = make_sample_ids(rows.ids[owner], sides)
    return Batch(ids, {"tokens": tokens, "response_mask": mask, SIDES: sides}, prompts, owner)


def samples_of(micro_batch: MicroBatch, lengths: Tensor) -> Tensor:
    """[m] int64: which samples a micro-batch has, of those whose sampled tokens have lengths [n]; none if it is empty.

    Every sample has sampled tokens.
    """
    sample = repeat_per_token(torch.arange(len(lengths)), lengths)[micro_batch.response_index]
    counts = micro_batch.response_lengths[micro_batch.response_lengths > 0]
    return sample[counts.cumsum(0) - 1]


def score_sides(engine: TrainEngine, rows: Batch) -> Tensor:
    """[n, 2] log-probabilities of both responses of each row, float32 and without gradient."""
    scores = engine.log_probs(side_by_side(rows))
    return segment_sum(scores.values, scores.lengths).view(-1, 2)


def inputs_of(rows: Batch, loss: PreferenceLoss, scores: tuple[Tensor, Tensor], divergence: Tensor) -> PreferenceInputs:
    """Input of a loss for rows whose responses have scores [n] each."""
    first, second = scores
    reference = rows.dense(REFERENCE_SCORES) if loss.uses_reference else torch.zeros(len(rows), 2)
    is_desirable = rows.dense("desirable") if loss.data == "singles" else torch.ones(len(rows), dtype=torch.bool)
    lengths = [rows.jagged(name).lengths for name in (FIRST, SECOND)]
    columns = (reference, *lengths, is_desirable, divergence.to(first.dtype))
    with one_copy(first.device):
        reference, first_lengths, second_lengths, is_desirable, divergence = (
            placed(one, first.device) for one in columns
        )
    reference_first, reference_second = reference.unbind(1)
    return PreferenceInputs(
        first,
        second,
        reference_first,
        reference_second,
        first_lengths,
        second_lengths,
        is_desirable,
        divergence,
    )


def loss_of_rows(
    engine: TrainEngine, loss: PreferenceLoss, rows: Batch, totals: Totals, micro_batch: MicroBatch
) -> Loss:
    """The loss of a micro-batch, which has both responses of each of its pairs; metrics are named without the role."""
    outputs, is_paired = engine.forward(micro_batch), loss.data == "pairs"
    lengths = rows.jagged(FIRST).lengths
    if is_paired:
        lengths = torch.stack([lengths, rows.jagged(SECOND).lengths], 1).flatten()
    samples = samples_of(micro_batch, lengths)
    order = samples.argsort()
    device = outputs.log_probs.device
    with one_copy(device):
        own_lengths, places = placed(lengths[samples], device), placed(order, device)
    sums = segment_sum(outputs.log_probs, own_lengths)[places]
    first, second = sums.view(-1, 2).unbind(1) if is_paired else (sums, torch.zeros_like(sums))
    own = rows.select(samples[order][::2] // 2 if is_paired else samples[order])
    inputs = inputs_of(own, loss, (first, second), totals.divergence)
    output = compute_preferences(loss, inputs)
    value, metrics = output.loss.sum() / totals.num_rows, rewards_of(loss, inputs, output)
    if loss.sft_coefficient:
        likelihood = -torch.where(inputs.is_desirable, first, 0.0).sum()
        value = value + loss.sft_coefficient * likelihood / totals.num_imitated
        metrics["sft_loss"] = Mean(likelihood, (inputs.first_lengths * inputs.is_desirable).sum())
    metrics["entropy"] = Mean(outputs.entropies.sum(), len(outputs.entropies))
    return Loss(value, outputs.log_probs, metrics)


def _named(loss: Loss, context: StageContext) -> Loss:
    """A loss whose metrics have the role in their names."""
    return Loss(loss.value, loss.scores, {metric_name(context, name): share for name, share in loss.metrics.items()})


def rewards_of(loss: PreferenceLoss, inputs: PreferenceInputs, output: PreferenceOutput) -> dict[str, Share]:
    """Metrics of both sides: chosen and rejected, or desirable and not."""
    chosen, rejected = output.first_rewards.detach(), output.second_rewards.detach()
    if loss.data == "singles":
        is_good = inputs.is_desirable
        return {
            "reward_chosen": _mean(chosen, is_good),
            "reward_rejected": _mean(chosen, ~is_good),
            "margin": _mean(torch.where(is_good, 1.0, -1.0) * chosen),
            "log_prob_chosen": _mean(inputs.first.detach(), is_good),
            "log_prob_rejected": _mean(inputs.first.detach(), ~is_good),
        }
    return {
        "accuracy": _mean((chosen > rejected).float()),
        "margin": _mean(chosen - rejected),
        "reward_chosen": _mean(chosen),
        "reward_rejected": _mean(rejected),
        "log_prob_chosen": _mean(inputs.first.detach()),
        "log_prob_rejected": _mean(inputs.second.detach()),
    }


def evaluate_preferences(
    loss: PreferenceLoss, rows: Batch, scores: Tensor, process_group: ProcessGroup
) -> dict[str, Share]:
    """This rank's shares of what is reported of held-out rows with scores [n, 2]; all ranks call it together."""
    divergence = torch.zeros(())
    if loss.data == "singles":
        ratios = (scores - rows.dense(REFERENCE_SCORES))[:, 1].double()
        total, count = process_group.sum(torch.stack([ratios.sum(), torch.tensor(len(ratios)).double()]), "divergence")
        divergence = total / count.clamp(min=1)
    first, second = scores.unbind(1)
    inputs = inputs_of(rows, loss, (first, second), divergence)
    output = compute_preferences(loss, inputs)
    named = rewards_of(loss, inputs, output)
    kept = {name: share for name, share in named.items() if name in {"accuracy", "margin"}}
    return {"loss": _mean(output.loss), **kept}


def _mean(values: Tensor, is_counted: Tensor | None = None) -> Mean:
    """The mean over rows, or over those that count."""
    if is_counted is None:
        return Mean(values.sum(), len(values))
    return Mean(torch.where(is_counted, values, 0.0).sum(), is_counted.sum())


def update_reward_model(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the likelihood of the preferences."""
    context.metrics.total("throughput/tokens", num_tokens(batch))
    for number, mine in parts_of_step(batch, context):
        rows = batch.select(mine)
        num_rows = float(context.sum(torch.tensor(len(rows)).double()))
        mini_batch = MiniBatch(number, with_ends(side_by_side(rows)), torch.empty(0))
        now = OptimizerUpdate(context.critic, mini_batch, context)
        for micro_batch in now:
            with now.passes.memory():
                now.backward(_pair_loss(micro_batch, rows, num_rows, context))
        now.step()
    return batch


def _pair_loss(micro_batch: MicroBatch, rows: Batch, num_rows: float, context: StageContext) -> Loss:
    """The loss of a micro-batch, which has both responses of each of its pairs."""
    values = context.critic.forward(micro_batch)
    loss, scores = pair_losses(values, rows, micro_batch, context.recipe.algorithm.reward_model.centering)
    metrics = {metric_name(context, name): share for name, share in shares_of(scores).items()}
    return Loss(loss.sum() / num_rows, values, metrics)


def pair_losses(values: Tensor, rows: Batch, micro_batch: MicroBatch, centering: float) -> tuple[Tensor, Tensor]:
    """The losses [n] of the pairs of a micro-batch, and the scores [n, 2] of both responses of each.

    Args:
        values: Number that is predicted for each response, [2 n].
        rows: All pairs, with their margins.
        micro_batch: Both responses of some pairs.
        centering: Coefficient of the squared sum of both scores.
    """
    samples = micro_batch.response_index  # one number is predicted for each
    order = samples.argsort()
    margins = rows.dense("margins")[samples[order][::2] // 2]
    with one_copy(values.device):
        places, margins = placed(order, values.device), placed(margins, values.device)
    scores = values[places].view(-1, 2)
    chosen, rejected = scores.unbind(1)
    return bradley_terry(chosen, rejected, margins, centering=centering), scores


def shares_of(scores: Tensor) -> dict[str, Share]:
    """Metrics of the scores [n, 2] of pairs."""
    chosen, rejected = scores.detach().unbind(1)
    return {
        "accuracy": Mean((chosen > rejected).sum(), len(chosen)),
        "margin": Mean((chosen - rejected).sum(), len(chosen)),
        "reward_chosen": Mean(chosen.sum(), len(chosen)),
        "reward_rejected": Mean(rejected.sum(), len(chosen)),
    }


def evaluate_reward_model(rows: Batch, scores: Tensor, centering: float) -> dict[str, Share]:
    """This rank's shares of what is reported of held-out pairs with scores [n, 2]."""
    chosen, rejected = scores.unbind(1)
    loss = bradley_terry(chosen, rejected, rows.dense("margins"), centering=centering)
    found = shares_of(scores)
    return {"loss": Mean(loss.sum(), len(loss)), "accuracy": found["accuracy"], "margin": found["margin"]}


def score_pairs(engine: ValueEngine, rows: Batch) -> Tensor:
    """[n, 2] scores of both responses of each row, without gradient."""
    return engine.values(with_ends(side_by_side(rows))).values.view(-1, 2)


def with_ends(samples: Batch) -> Batch:
    """Samples of which a value model predicts one number: at their last token.

    A value stands before a sampled token, so one more is put behind each sample; no model reads it.
    """
    tokens = samples.jagged("tokens")
    lengths = tokens.lengths + 1
    ends = lengths.cumsum(0) - 1
    values, mask = tokens.values.new_zeros(int(lengths.sum())), torch.zeros(int(lengths.sum()), dtype=torch.bool)
    mask[ends] = True
    values[~mask] = tokens.values
    columns = {"tokens": Jagged(values, lengths, "tokens"), "response_mask": Jagged(mask, lengths, "tokens")}
    kept = {name: column for name, column in samples.columns.items() if name == "sides"}
    return Batch(samples.ids, {**kept, **columns}, samples.prompts, samples.prompt_index)


def model_reward(batch: Batch, context: StageContext) -> Batch:
    """Reward each response by the score of a reward model at its last token, next to earlier rewards if there are any.

    A score that is no number fails its response.
    """
    engine, config = context.critic, context.recipe.algorithm.reward_model
    values = engine.values(with_ends(batch.only([name for name in (*SEQUENCE, IMAGES) if name in batch]))).values
    is_valid, rewards = values.isfinite(), config.weight * torch.where(values.isfinite(), values, 0.0)
    name = context.node.node.role or ""
    details: list[dict[str, object]] = [{name: _detail(value)} for value in values.tolist()]
    if "rewards" in batch:
        is_valid = is_valid & batch.dense("reward_valid")
        rewards = batch.dense("rewards") + rewards
        earlier = [one if isinstance(one, Mapping) else {} for one in batch.objects("reward_details")]
        details = [{**before, **own} for before, own in zip(earlier, details, strict=True)]
    rewards = torch.where(is_valid, rewards, 0.0)
    finite = values[values.isfinite()]
    context.metrics.mean(f"reward/{name}", finite.sum(), len(finite))
    if "rewards" not in batch:
        context.metrics.spread("reward", rewards[is_valid])
        context.metrics.total("reward/failed", int((~is_valid).sum()))
    return batch.with_columns(rewards=rewards, reward_valid=is_valid, reward_details=tuple(details))  # type: ignore[arg-type]


def _detail(value: float) -> dict[str, object]:
    if math.isfinite(value):
        return {"value": value, "answer": None}
    return {"error": f"the reward model has the score {value}: look at its weights"}
