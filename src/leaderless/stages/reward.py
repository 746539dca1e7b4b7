"""The stage that computes rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from leaderless.config import Json, Recipe
from leaderless.config.data import DatasetConfig
from leaderless.data.batch import Batch
from leaderless.data.encode import Tokenizer
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.stages.context import StageContext


def reward(batch: Batch, context: StageContext) -> Batch:
    """Grade each response by the recipe's rewards that apply to its source."""
    inputs = inputs_of(batch, context)
    graded = context.grade(inputs, [context.recipe.data.source_of(one.row) for one in inputs])
    rewards = torch.tensor([g.value for g in graded], dtype=torch.float32)
    is_valid = torch.tensor([g.is_valid for g in graded], dtype=torch.bool)
    _report(context, graded, rewards, is_sampled(batch))
    return batch.with_columns(
        rewards=rewards, reward_valid=is_valid, reward_details=tuple(dict(g.details) for g in graded)
    )


def inputs_of(batch: Batch, context: StageContext) -> list[RewardInput]:
    """The inputs of rewards for samples of training data."""
    rows = [row for row in batch.objects("rows") if isinstance(row, Mapping)]
    texts = decode_responses(context.tokenizer, batch.jagged("tokens").to_lists(), context.recipe)
    configs = [context.recipe.data.train_set_of(row) for row in rows]
    return reward_inputs(configs, rows, texts, batch.dense("truncated").tolist())


def is_sampled(batch: Batch) -> Tensor:
    """[n] bool: responses that are in metrics; not the greedy ones, which are only baselines."""
    return ~batch.dense("is_greedy") if "is_greedy" in batch else torch.ones(len(batch), dtype=torch.bool)


def _report(context: StageContext, graded: Sequence[Graded], rewards: Tensor, is_reported: Tensor) -> None:
    is_valid = torch.tensor([g.is_valid for g in graded], dtype=torch.bool)
    context.metrics.spread("reward", rewards[is_valid & is_reported])
    context.metrics.total("reward/failed", int((~is_valid).sum()))
    errors = ((name, error) for g in graded for name in g.details if (error := reward_error(g.details, name)))
    for name, error in islice(errors, 1):
        context.run_directory.note_reward_error(context.step, context.process_group.rank, name, error)
    details = [g.details for g, is_kept in zip(graded, is_reported.tolist(), strict=True) if is_kept]
    for name in context.recipe.reward.options():
        values = [value for detail in details if (value := reward_value(detail, name)) is not None]
        context.metrics.mean(f"reward/{name}", sum(values), len(values))


def reward_value(details: Mapping[str, Json], name: str) -> float | None:
    """The value of one reward of a sample, before weighting; None if it failed or does not apply."""
    outcome = details.get(name)
    value = outcome.get("value") if isinstance(outcome, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def reward_error(details: Mapping[str, Json], name: str) -> str:
    """The error of one reward of a sample; empty where it did not fail."""
    outcome = details.get(name)
    error = outcome.get("error") if isinstance(outcome, Mapping) else None
    return error if isinstance(error, str) else ""


def reward_inputs(
    configs: Sequence[DatasetConfig],
    rows: Sequence[Mapping[str, Json]],
    texts: Sequence[str],
    truncated: Sequence[bool],
) -> list[RewardInput]:
    """The inputs of rewards for some responses, given the dataset of each, its row, its text and whether it was cut."""
    return [
        RewardInput(
            prompt=row.get(config.prompt),
            response=text,
            answer=row[config.answer] if config.answer else None,
            row=row,
            is_truncated=is_truncated,
        )
        for config, row, text, is_truncated in zip(configs, rows, texts, truncated, strict=True)
    ]


def decode_responses(tokenizer: Tokenizer, responses: Sequence[Sequence[int]], recipe: Recipe) -> list[str]:
    """Responses as text, without special tokens and without the stop text that ended them."""
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]
    for stop in recipe.rollout.stop:
        texts = [text.partition(stop)[0] for text in texts]
    return texts
