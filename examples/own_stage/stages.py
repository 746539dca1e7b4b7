"""A custom stage: a function of a batch that declares which columns it reads and writes."""

from __future__ import annotations

from leaderless import Batch, StageContext, stage

PENALTY = 0.05
"""Amount subtracted from the reward for each token of a response."""


@stage(reads=["rewards", "response_lengths"], writes=["rewards"])
def length_penalty(batch: Batch, context: StageContext) -> Batch:
    """Prefer the shorter of two right answers.

    Args:
        batch: Samples.
        context: Metrics and settings of the step.
    """
    penalty = PENALTY * batch.dense("response_lengths").float()
    context.metrics.mean("length_penalty", penalty.sum(), len(batch))
    return batch.with_columns(rewards=batch.dense("rewards") - penalty)
