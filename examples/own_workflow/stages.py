"""A stage that drops rows. The planner makes sure that it also receives the columns that later nodes need."""

from __future__ import annotations

import torch

from leaderless import Batch, StageContext, stage


@stage(reads=["advantages"], rows="filter")
def informative(batch: Batch, context: StageContext) -> Batch:
    """Keep samples whose advantage is not 0: the others would be scored although they change no weight.

    Args:
        batch: Samples with advantages, which are the same for all tokens of a sample.
        context: Metrics and settings of the step.
    """
    keep = torch.tensor([bool(row.any()) for row in batch.jagged("advantages").rows()], dtype=torch.bool)
    context.metrics.mean("informative/kept", keep.sum(), len(batch))
    return batch.select(keep)
