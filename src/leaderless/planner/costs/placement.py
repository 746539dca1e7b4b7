"""Which rank has which row through a step: as the dataloader deals them out and the databuffer assigns them."""

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
    """Where the rows of one change of layout come from and go to.

    Attributes:
        rows: That go.
        holders: [n] rank that sends each row.
        owners: [n] shard of the target layout that gets it.
        source: The layout that it leaves.
        target: The layout that it enters.
        is_agreed: The owners were found by an earlier change of layout.
        spares: For each rank, the rows that it has already from an earlier change of layout, ascending.
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
        """Begin a step; no rank has a row.

        Args:
            plan: Of the run.
            workload: Its rows.
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
            row_set: That has come to the layout.
            layout: Where it is.
        """
        return self._shards[row_set, _divided(layout)]

    def load(self, action: Load) -> Int:
        """Deal out the prompts: each shard takes a contiguous part of the step.

        Args:
            action: The entry of the chain.

        Returns:
            [n] shard of each prompt.
        """
        num_rows, dp = len(self.workload.prompts), action.layout.dp
        firsts = num_rows * np.arange(dp) // dp
        shards = np.searchsorted(firsts, np.arange(num_rows), side="right") - 1
        self._shards["data", _divided(action.layout)] = shards
        return shards

    def run(self, node: PlannedNode) -> Int:
        """Let a node put out its rows where it got them: a response is where its prompt is.

        Args:
            node: That runs.

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
        """Bring rows to another layout: the assignment is the databuffer's own.

        Args:
            action: The entry of the chain.
        """
        rows, target = self.rows(action.row_set), action.target_layout
        holders = speakers(self.shards(action.row_set, action.source_layout), action.source_layout)
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
    """[n] shard that gets each row, as all ranks of the change of layout compute it.

    Args:
        action: The entry of the chain.
        rows: That go.
        holders: [n] rank that sends each.
        spares: As `Routes` has them.
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


def speakers(shards: Int, layout: Layout) -> Int:
    """[n] rank that sends each row; the ranks that hold the same rows share them out, in order.

    Args:
        shards: [n] shard that holds each row.
        layout: Of the shards.
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
