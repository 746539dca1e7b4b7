"""The stage that drops prompts that have nothing to teach."""

from __future__ import annotations

from leaderless.algorithms import Groups
from leaderless.data.batch import Batch
from leaderless.stages.context import StageContext


def dynamic_sampling(batch: Batch, context: StageContext) -> Batch:
    """Keep the groups with a signal: at least two valid rewards, and not all the same.

    Source: DAPO, arXiv 2503.14476, section 3.2, equation 11, which keeps prompts that some, but not all responses
    answer correctly. Here rewards are compared as they are, before they are shaped, so that graded rewards work too; a
    dropped group counts as all right where its rewards are above 0.

    Args:
        batch: Samples with rewards, in whole groups.
        context: Takes the counts.

    Returns:
        The samples of the groups that are kept.
    """
    groups = Groups.of(batch.dense("rewards"), batch.dense("reward_valid"), batch.group_ids)
    speaks = context.node.layout.is_first_of_shard(context.process_group.rank)
    is_silent = (groups.count >= 2) & ~groups.has_signal
    is_right = groups.mean > 0
    for name, counted in {
        "kept": groups.has_signal,
        "dropped_all_right": is_silent & is_right,
        "dropped_all_wrong": is_silent & ~is_right,
        "dropped_failed": groups.count < 2,
    }.items():
        context.metrics.total(f"sampling/{name}", counted.sum() if speaks else 0)
    return batch.select(groups.has_signal[groups.index])
