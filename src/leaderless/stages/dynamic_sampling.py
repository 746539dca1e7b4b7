"""The stage that drops groups without a learning signal."""

from __future__ import annotations

from leaderless.algorithms import Groups
from leaderless.data.batch import Batch
from leaderless.stages.context import StageContext


def dynamic_sampling(batch: Batch, context: StageContext) -> Batch:
    """Keep the groups with a signal: at least two valid rewards, and not all the same.

    Source: DAPO, arXiv 2503.14476, section 3.2, equation 11, which keeps prompts that some but not all responses answer
    correctly. Here the raw rewards are compared, before any shaping, so that graded rewards work too; a dropped group
    counts as all right if its rewards are above 0.
    """
    groups = Groups.of(batch.dense("rewards"), batch.dense("reward_valid"), batch.group_ids)
    is_reporting = context.node.layout.is_first_of_shard(context.process_group.rank)
    is_silent = (groups.count >= 2) & ~groups.has_signal
    is_right = groups.mean > 0
    for name, counted in {
        "kept": groups.has_signal,
        "dropped_all_right": is_silent & is_right,
        "dropped_all_wrong": is_silent & ~is_right,
        "dropped_failed": groups.count < 2,
    }.items():
        context.metrics.total(f"sampling/{name}", counted.sum() if is_reporting else 0)
    return batch.select(groups.has_signal[groups.index])
