"""The stages of nodes that the planner adds: they join the rows of several nodes, and select some rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.planner.graph.row_sets import AGENT
from leaderless.planner.workflow.workflow import Value
from leaderless.stages.context import StageContext


def join(batch: Batch, context: StageContext) -> Batch:  # noqa: ARG001
    """Return rows, which the databuffer adds to the other nodes' rows."""
    return batch


def select(batch: Batch, context: StageContext) -> Batch:
    """Keep the rows that have one of the asked-for values in every column that the node names."""
    is_kept = torch.ones(len(batch), dtype=torch.bool)
    for column, values in context.node.node.where:
        wanted: Sequence[Value] = [context.agents.index(str(value)) for value in values] if column == AGENT else values
        is_kept &= _has_one_of(batch, column, wanted)
    return batch.select(is_kept)


def _has_one_of(batch: Batch, name: str, values: Sequence[Value]) -> Tensor:
    """[n] bool: rows with one of some values in a dense or object column."""
    column = batch[name]
    if isinstance(column, tuple):
        return torch.tensor([value in values for value in column], dtype=torch.bool)
    if any(isinstance(value, str) for value in values):
        raise ValueError(f"column '{name}' holds numbers, so it cannot be one of {values}: give numbers in `where`")
    return torch.isin(batch.dense(name).double(), torch.tensor([float(value) for value in values], dtype=torch.double))
