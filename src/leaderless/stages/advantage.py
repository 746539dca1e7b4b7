"""The stages that turn rewards into advantages."""

from __future__ import annotations

from leaderless.algorithms import count_groups_without_signal, grpo_advantages, repeat_per_token
from leaderless.data.batch import Batch, Jagged
from leaderless.stages.context import StageContext


def grpo(batch: Batch, context: StageContext) -> Batch:
    """Advantages relative to the group; every token of a response has the same.

    Args:
        batch: Samples, in whole groups.
        context: Whose recipe says whether to normalise.

    Returns:
        The samples with `advantages`.
    """
    config = context.recipe.algorithm.advantage
    advantages = grpo_advantages(
        batch.dense("rewards"),
        batch.dense("reward_valid"),
        batch.group_ids,
        normalize_by_std=config.normalize_by_std,
        epsilon=config.epsilon,
    )
    silent, groups = count_groups_without_signal(advantages, batch.group_ids)
    context.metrics.mean("group/no_signal", silent, groups)
    lengths = batch.dense("response_lengths")
    return batch.with_columns(advantages=Jagged(repeat_per_token(advantages, lengths), lengths, "response_tokens"))
