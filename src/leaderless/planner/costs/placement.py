"""Which rank holds which row through a step, as the dataloader divides them and the databuffer assigns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from leaderless.data.balance import assign
from leaderless.planner import Layout, Load, Plan, PlannedNode, Reshard
from leaderless.planner.costs.rows import Int, Rows, Workload
from leaderless.planner.schedule import is_expanded


@dataclass(frozen=True)
class Routes:
    """Where the rows of one reshard come from and go to.

    Attributes:
        rows: Rows that are sent.
        holders: [n] rank that sends each row.
        owners: [n] shard of the target layout that gets it.
        source: The layout that it leaves.
        target: The layout that it enters.
        is_agreed: The owners were found by an earlier reshard.
        spares: Rows that each rank has already from an earlier reshard, ascending, by rank.
    """

    rows: Rows
    holders: Int
    owners: Int
    source: Layout
    target: Layout
    is_agreed: bool
    spares: Mapping[int, Int] = field(default_factory=dict)


class Placement:
    """The shard of each row, for every row set and layout that has rows."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        """Begin a step, in which no rank has a row yet.

        Args:
            plan: Plan of the run.
            workload: Rows of the step.
        """
        self.plan = plan
        self.workload = workload
        self._shards: dict[tuple[str, Layout], Int] = {}

    def rows(self, row_set: str) -> Rows:
        """The rows of a row set; filters are taken to keep all of theirs.

        Args:
            row_set: Named by the node that made it.
        """
        return self.workload.samples if is_expanded(self.plan.nodes, row_set) else self.workload.prompts

    def shards(self, row_set: str, layout: Layout) -> Int:
        """[n] shard of each row.

        Args:
            row_set: A row set of the layout.
            layout: The layout.
        """
        return self._shards[row_set, _divided(layout)]

    def load(self, action: Load) -> Int:
        """Divide the prompts: each shard takes a contiguous part of the step.

        Args:
            action: Entry of the chain.

        Returns:
            [n] shard of each prompt.
        """
        num_rows, dp = len(self.workload.prompts), action.layout.dp
        firsts = num_rows * np.arange(dp) // dp
        shards = np.searchsorted(firsts, np.arange(num_rows), side="right") - 1
        self._shards["data", _divided(action.layout)] = shards
        return shards

    def run(self, node: PlannedNode) -> Int:
        """Put out a node's rows where it got them: a response is where its prompt is.

        Args:
            node: The node that runs.

        Returns:
            [n] shard of each row that it puts out.
        """
        before = self.shards(node.row_set, node.layout)
        shards = before
        if node.spec.rows == "expand":
            shards = before[self.rows(node.row_set_after).groups]
        self._shards[node.row_set_after, _divided(node.layout)] = shards
        return shards

    def reshard(self, action: Reshard) -> Routes:
        """Reshard rows; the assignment is the databuffer's own.

        Args:
            action: Entry of the chain.
        """
        rows, target = self.rows(action.row_set), action.target_layout
        holders = sending_ranks(self.shards(action.row_set, action.source_layout), action.source_layout)
        key = (action.row_set, _divided(target))
        is_agreed, spares = key in self._shards, self._spares(action)
        if not is_agreed:
            self._shards[key] = owners_of(action, rows, holders, spares)
        return Routes(rows, holders, self._shards[key], action.source_layout, target, is_agreed, spares)

    def _spares(self, action: Reshard) -> dict[int, Int]:
        """For each rank of the target layout, the rows that it has got with the same columns before."""
        spare = action.spare_layout
        if spare is None:
            return {}
        shards = self.shards(action.row_set, spare)
        order = np.argsort(shards, kind="stable")
        of_shard = np.split(order, np.searchsorted(shards[order], np.arange(1, spare.dp)))
        ranks = [rank for rank in spare.ranks if rank in action.target_layout]
        return {rank: of_shard[spare.shard_of(rank)] for rank in ranks if len(of_shard[spare.shard_of(rank)])}


def _divided(layout: Layout) -> Layout:
    """Layouts that hold the same rows on the same ranks are one."""
    return Layout(layout.ranks, layout.dp)


def owners_of(action: Reshard, rows: Rows, holders: Int, spares: Mapping[int, Int]) -> Int:
    """[n] shard that gets each row, as all ranks of the reshard compute it.

    Args:
        action: Entry of the chain.
        rows: Rows that are sent.
        holders: [n] rank that sends each.
        spares: Rows that each rank has already, by rank.
    """
    target, last = action.target_layout, action.ranks[-1]
    units = rows.groups if action.keep_groups else np.arange(len(rows))
    before, shards = (_shard_of_rank(layout, last)[holders] for layout in (action.source_layout, target))
    for rank in sorted(spares):
        known = spares[rank]
        shards[known[shards[known] < 0]] = target.shard_of(rank)
    return assign(rows.costs(action.columns, before), units, shards, target.dp)


def _shard_of_rank(layout: Layout, last: int) -> Int:
    """[last + 1] shard of each rank, or -1."""
    shards = np.full(last + 1, -1, dtype=np.int64)
    shards[list(layout.ranks)] = np.arange(len(layout.ranks)) // layout.ranks_per_shard
    return shards


def sending_ranks(shards: Int, layout: Layout) -> Int:
    """[n] rank that sends each row; the ranks that hold the same rows share them out, in order.

    Args:
        shards: [n] shard that holds each row.
        layout: Layout of the shards.
    """
    size = layout.ranks_per_shard
    ranks = np.array(layout.ranks)
    if size == 1:
        sole: Int = ranks[shards]
        return sole
    order = np.argsort(shards, kind="stable")
    counts = np.bincount(shards, minlength=layout.dp)
    place = np.empty(len(shards), dtype=np.int64)
    place[order] = np.arange(len(shards)) - np.repeat(np.cumsum(counts) - counts, counts)
    # A rank's part ends before count * (part + 1) // size.
    part = ((place + 1) * size - 1) // np.maximum(counts[shards], 1)
    spoken: Int = ranks[shards * size + part]
    return spoken
