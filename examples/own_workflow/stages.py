"""A stage that leaves rows out. Columns that later nodes need are carried along; the planner sees to that."""

from __future__ import annotations

import torch

from leaderless import Batch, StageContext, stage


@stage(reads=["advantages"], rows="filter")
def informative(batch: Batch, context: StageContext) -> Batch:
    """Keep samples whose advantage is not 0: the others change no weight, but would be scored all the same.

    Args:
        batch: Samples with advantages, the same for all tokens of one.
        context: Metrics and settings of the step.
    """
    keep = torch.tensor([bool(row.any()) for row in batch.jagged("advantages").rows()], dtype=torch.bool)
    context.metrics.mean("informative/kept", keep.sum(), len(batch))
    return batch.select(keep)
