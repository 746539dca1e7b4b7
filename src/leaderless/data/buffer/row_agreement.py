"""Agreements of ranks about rows that each has a part of.

The groups at given positions among the groups of all ranks, in the order of their ids: few ranks gather the ids of all
groups; with many ranks, each gets the ids of a range, and the number of ids in other ranges. A step takes its groups
out of the surplus in this way.

Before ranks send rows, they compare them: each shard has one set of rows, and columns have one type on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from leaderless.data.batch import Batch, with_rows
from leaderless.data.buffer.block_exchange import ExchangeLeg, MeshPosition, Talk, hold
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout
from leaderless.planner.assign.balance import NO_GROUP, Int, at_places
from leaderless.planner.assign.blocks import SELECTION_LEGS, Mesh, is_in_blocks

Places = Callable[[int], Int]
"""Takes the number of all groups, and returns the places that are asked for."""


class Span(NamedTuple):
    """Number of some groups, and the first and the last id; None where there are none."""

    groups: int
    first_group: int | None = None
    last_group: int | None = None


def span_of(process_group: ProcessGroup, mine: Int, what: str) -> Span:
    """The different groups of all ranks, which call it together; `mine` are this rank's groups."""
    count, ends = select(process_group, mine, lambda count: np.array([0, count - 1]), what)
    return Span(count, *ends.tolist()) if count else Span(0)


def select(process_group: ProcessGroup, mine: Int, places: Places, what: str) -> tuple[int, Int]:
    """Number of different groups of all ranks, and [k >= 1] which are at certain places of their ascending order.

    All ranks of the process group call it together; `mine` are groups of this one, of which others may have some, too.
    """
    mine = np.unique(mine)
    if is_in_blocks(process_group.size, SELECTION_LEGS):
        place = MeshPosition(Mesh(process_group.size), process_group.ranks.index(process_group.rank))
        return hold(process_group, select_in_blocks(place, mine, places), what)
    groups = np.unique(torch.cat(process_group.gather(torch.from_numpy(mine), what)).numpy())
    return len(groups), at_places(groups, places(len(groups)))


def select_in_blocks(place: MeshPosition, mine: Int, places: Places) -> Talk[tuple[int, Int]]:
    """The same where each rank hears of one range of ids, and how many there are in the others."""
    ends = np.array([[mine.min(initial=NO_GROUP), -mine.max(initial=-NO_GROUP)]])
    least, most = (yield from _lowest(place, ends)).tolist()
    if least == NO_GROUP:
        return 0, np.full_like(places(0), NO_GROUP)
    width = (-most - least) // place.mesh.num_ranks + 1
    here = np.unique((yield from place.route((mine - least) // width, mine[:, None])))
    counts = np.concatenate((yield from place.to_block(np.array([[len(here)]]))))[:, 0]
    totals = (yield from place.across(np.array([counts.sum()])))[:, 0]
    begin = int(totals[: place.block].sum() + counts[: place.column].sum())
    wanted = places(int(totals.sum()))
    is_here = (wanted >= begin) & (wanted < begin + len(here))
    found = np.where(is_here, at_places(here, np.clip(wanted - begin, 0, len(here))), NO_GROUP)
    return int(totals.sum()), (yield from _lowest(place, found[None]))


def _lowest(place: MeshPosition, row: Int) -> Talk[Int]:
    """[k] the lowest of all ranks' rows, [1, k] each."""
    block = np.concatenate((yield from place.to_block(row)))
    world = yield from place.across(block.min(axis=0))
    found: Int = world.min(axis=0)
    return found


NOBODY = np.iinfo(np.int64).max
TYPES, NUM_ROWS, ROWS = range(3)
"""Facts of a rank: a digest of its columns' types, the number of its rows, and a digest of their ids."""


@dataclass(frozen=True)
class Unlike:
    """The difference, or None: the lowest rank whose rows differ from its peers', and two ranks whose types differ."""

    rows: int | None
    types: tuple[int, int] | None


def find_unlike(process_group: ProcessGroup, layout: Layout, facts: Int, what: str) -> Unlike:
    """Compare facts, [3], of all ranks of a layout, which call it together: the same result on each."""
    if is_in_blocks(process_group.size):
        return hold(process_group, unlike_in_blocks(layout, process_group.rank, facts), what)
    return unlike_of(layout, torch.cat(process_group.gather(torch.from_numpy(facts[None]), what)).numpy())


def unlike_of(layout: Layout, facts: Int) -> Unlike:
    """The result on a rank that has the facts of all, [ranks, 3]."""
    ranks, places = np.array(layout.ranks), np.arange(len(layout.ranks))
    others = ranks[facts[:, ROWS] != facts[places - places % layout.ranks_per_shard, ROWS]]
    # A rank without rows may not know the types of its columns.
    knowing = facts[:, NUM_ROWS] > 0
    return _answer(int(others.min(initial=NOBODY)), _two_types(ranks[knowing], facts[knowing, TYPES]))


def unlike_in_blocks(layout: Layout, rank: int, facts: Int) -> Talk[Unlike]:
    """The result where a rank knows the facts of its peers and of its block, and summaries of other blocks."""
    place = MeshPosition(Mesh(len(layout.ranks)), layout.place(rank))
    other = NOBODY
    if layout.ranks_per_shard > 1:
        begin = place.number - layout.place_in_shard(rank)
        peers = [peer for peer in range(begin, begin + layout.ranks_per_shard) if peer != place.number]
        heard = yield ExchangeLeg(dict.fromkeys(peers, facts[[ROWS]]), peers)
        if place.number != begin and int(heard[begin][0]) != int(facts[ROWS]):
            other = rank
    mine = [other, rank if facts[NUM_ROWS] else NOBODY, int(facts[TYPES]), NOBODY]
    block = np.concatenate((yield from place.to_block(np.array([mine]))))
    found = _joined((yield from place.across(_joined(block))))
    return _answer(int(found[0]), found[1:])


def _joined(rows: Int) -> Int:
    """[4] of some ranks, from results of parts of them: the lowest with other rows, and as `_two_types` puts out."""
    firsts, types, seconds = rows[:, 1], rows[:, 2], rows[:, 3]
    joined = _two_types(firsts[firsts < NOBODY], types[firsts < NOBODY])
    # A part whose first rank has the first types of all may have another rank that differs.
    is_like = (types == joined[1]) & (firsts < NOBODY)
    joined[2] = min(int(joined[2]), int(seconds[is_like].min(initial=NOBODY)))
    return np.array([rows[:, 0].min(), *joined])


def _two_types(ranks: Int, types: Int) -> Int:
    """[3] the lowest of some ranks, its types, and the lowest rank with other types."""
    if not len(ranks):
        return np.array([NOBODY, 0, NOBODY])
    first = int(ranks.argmin())
    return np.array([ranks[first], types[first], ranks[types != types[first]].min(initial=NOBODY)])


def _answer(rows: int, types: Int) -> Unlike:
    first, _, second = types.tolist()
    return Unlike(None if rows == NOBODY else rows, None if second == NOBODY else (first, second))


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
