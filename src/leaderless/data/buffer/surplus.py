"""Groups that repeated nodes have chosen and no step has taken yet, carried over from step to step."""

from __future__ import annotations

import numpy as np
import torch

from leaderless.data.batch import Batch, with_rows
from leaderless.data.buffer.group_selection import Span, select
from leaderless.distributed.transport import ProcessGroup


class Surplus:
    """The rows of one shard, whole groups; None until the first round. Batches are never changed in place."""

    def __init__(self, batch: Batch | None = None) -> None:
        self.batch = batch
        self.carried = Span(0)
        """The groups of all shards that the last step has left."""

    def add(self, batch: Batch) -> None:
        """Take in what has come out of a round: whole groups, none of which is here already."""
        self.batch = batch if self.batch is None else Batch.concat(with_rows([self.batch, batch]))

    @property
    def num_groups(self) -> int:
        """Groups that this shard has."""
        return 0 if self.batch is None else len(torch.unique(self.batch.group_ids))

    def take(self, num_groups: int, process_group: ProcessGroup) -> Batch:
        """Take out the groups with the lowest ids of all shards, at most `num_groups`. All ranks of the layout call it.

        Ids follow the order of the data, so which groups are taken depends on no layout, and those that have waited
        come first.
        """
        assert self.batch is not None, "a step takes groups after a round, or those that it has inherited"
        mine = self.batch.group_ids
        what = "the groups that were chosen"
        num_known, ends = select(process_group, mine.numpy(), lambda count: np.array([num_groups, count - 1]), what)
        first, last = ends.tolist()
        self.carried = Span(num_known - num_groups, first, last) if num_known > num_groups else Span(0)
        is_taken = mine < first
        taken, self.batch = self.batch.select(is_taken), self.batch.select(~is_taken)
        return taken
