"""The stages that train a reward model, and that reward responses by one."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from leaderless.algorithms.loss_terms import bradley_terry
from leaderless.data.batch import Batch, Jagged
from leaderless.models.uploads import one_copy, placed
from leaderless.observability.metrics import Mean, Share
from leaderless.planner.workflow.columns import IMAGES
from leaderless.planner.workflow.training_stages import SEQUENCE
from leaderless.stages.context import StageContext
from leaderless.stages.mini_batches import Loss, MiniBatch, OptimizerUpdate, metric_name
from leaderless.stages.preferences import num_tokens, parts_of_step, side_by_side
from leaderless.training.engine import ValueEngine
from leaderless.training.micro_batches import MicroBatch


def update_reward_model(batch: Batch, context: StageContext) -> Batch:
    """Make `batch.updates_per_step` updates on the likelihood of the preferences."""
    context.metrics.total("throughput/tokens", num_tokens(batch))
    for number, rows in parts_of_step(batch, context):
        num_rows = float(context.sum(torch.tensor(len(rows)).double()))
        mini_batch = MiniBatch(number, with_ends(side_by_side(rows)), torch.empty(0))
        now = OptimizerUpdate(context.critic, mini_batch, context)
        for micro_batch in now:
            with now.memory():
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
