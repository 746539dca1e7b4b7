"""Where every row goes, agreed in blocks: a rank receives facts about the rows of its block, and about its own groups.

Facts about the rows of a group meet on the group's home, a rank that follows from its number. The home checks that each
row is held once, gives the units to the blocks that divide them, and sends the result to all ranks that send or receive
rows of the group.

    ranks with rows
          |       facts about each row, to the home of its group
    homes         each row is held once; rows are joined into units, with costs
          |       units, to the block whose shard has them, or to one that follows from their number
    blocks        surplus work goes to other blocks, then each block divides what it has
          |       the shard of each unit, to its home
    homes         all rows of a group have owners
          |       facts about all rows of a group, with shards
    ranks that have or receive rows of the group
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from leaderless.data.buffer.block_exchange import MeshPosition, Talk
from leaderless.data.buffer.row_agreement import select_in_blocks
from leaderless.planner import Reshard
from leaderless.planner.assign.balance import EarlierWork, Int, by_part, first_places, parts_of
from leaderless.planner.assign.blocks import (
    HOME,
    BlockUnits,
    Mesh,
    Shards,
    divide,
    first_blocks,
    flows,
    leaving,
    spread,
)
from leaderless.planner.assign.routes import RowRoutes

HELD, SPARE, WANTED = range(3)
"""Kinds of facts: a row that a rank has, a row that it received before, a row that it needs."""
KIND, ID, GROUP, RANK, SHARD, COST = range(6)
"""Fields of a fact; the shard is one of the target, or -1."""
NOTHING = np.empty((0, 6), dtype=np.int64)
NO_ID = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Meeting:
    """The ranks of a reshard in blocks."""

    action: Reshard
    ranks: tuple[int, ...]
    hosts: Mapping[int, int]

    @cached_property
    def mesh(self) -> Mesh:
        """The blocks."""
        return Mesh(len(self.ranks))

    @cached_property
    def _ranks(self) -> Int:
        return np.array(self.ranks)

    @cached_property
    def target_ranks(self) -> Int:
        """[dp, ranks_per_shard] ranks of each shard."""
        return np.array(self.action.target_layout.ranks).reshape(self.action.target_layout.dp, -1)

    @cached_property
    def shards(self) -> Shards:
        """Shards of the target in the blocks."""
        return Shards.of(self.mesh, self.places(self.target_ranks[:, 0]))

    def places(self, ranks: Int) -> Int:
        """[n] place of each rank."""
        return np.searchsorted(self._ranks, ranks)

    def place(self, rank: int) -> MeshPosition:
        """The place of a rank."""
        return MeshPosition(self.mesh, int(self.places(np.array([rank]))[0]))


def agree(meeting: Meeting, rank: int, facts: Int, earlier: EarlierWork | None) -> Talk[RowRoutes]:
    """The routes of all groups of which a rank has or receives rows.

    Args:
        meeting: All ranks of the reshard.
        rank: This one.
        facts: [n, 6] facts about its rows.
        earlier: Work of shards in earlier windows, of which only the work of the rank's block counts and grows.
    """
    action, place = meeting.action, meeting.place(rank)
    # The number of a group alone decides, so that all ranks with rows of it find its home without asking.
    homes = spread(facts[:, GROUP], HOME, meeting.mesh.num_ranks)
    known = yield from place.route(homes, facts)
    # Facts come by way of other ranks. In this order the first row of a unit, and the first spare of a row, is that of
    # the lowest rank, as where all ranks know all rows.
    known = known[np.lexsort((known[:, ID], known[:, RANK], known[:, KIND]))]
    rows, spares, claims = (known[known[:, KIND] == kind] for kind in (HELD, SPARE, WANTED))
    first, is_claimed = yield from _check(action, place, rows, claims)
    if is_claimed:
        # An earlier reshard has divided the rows: they keep their owners, so that all columns of a row are together.
        order = np.argsort(claims[:, ID])
        owners = claims[order, SHARD][np.searchsorted(claims[order, ID], rows[:, ID])]
    else:
        if earlier is not None:
            # Groups of other windows are unknown, so that the part follows from the id and not from the place.
            parts = earlier.parts_of(rows[:, GROUP])
        else:
            parts = yield from _parts(place, rows[:, GROUP], action.num_updates)
        owners = yield from _assigned(meeting, place, _with_spares(rows, spares), parts, earlier)
    told, sent = _news(meeting, rows, owners, spares)
    news = yield from place.route(told, sent)
    return _routes(meeting, news, first)


def _check(action: Reshard, place: MeshPosition, rows: Int, claims: Int) -> Talk[tuple[int, bool]]:
    """Check that each row is held once, and wanted once if rows are wanted at all: the same result on all ranks.

    Returns:
        The lowest rank that has rows, and whether rows are wanted.
    """
    ids, wanted = np.sort(rows[:, ID]), np.sort(claims[:, ID])
    twice = ids[1:][ids[1:] == ids[:-1]]
    lowest = [int(twice.min(initial=NO_ID)), int(rows[:, RANK].min(initial=NO_ID))]
    mine = np.array([[*lowest, len(ids), len(wanted), int(not np.array_equal(ids, wanted))]])
    # Two legs reach all ranks: the sums of a block are known in it, and go from there to every other block.
    block = yield from place.to_block(mine)
    world = yield from place.across(_joined(np.concatenate(block)))
    # All ranks have the same numbers, so that all of them raise the error, and none is left waiting.
    double, first, num_held, num_wanted, num_unlike = _joined(world).tolist()
    if double != NO_ID:
        raise RuntimeError(f"edge {action.name}: row {double} is held by two shards")
    if num_wanted and num_unlike:
        raise RuntimeError(
            f"edge {action.name}: {num_held} rows are held, but {num_wanted} are wanted, or they are not the same"
        )
    # Where no rank has rows, any rank may send the types of the columns.
    return (first if num_held else action.source_layout.ranks[0]), num_wanted > 0


def _joined(rows: Int) -> Int:
    """The minima of the first two columns, and the sums of the other columns."""
    return np.concatenate([rows[:, :2].min(axis=0), rows[:, 2:].sum(axis=0)])


def _with_spares(rows: Int, spares: Int) -> Int:
    """Rows whose holder has no shard of the target are held by the lowest rank that received them before."""
    if not len(spares):
        return rows
    ids, first = np.unique(spares[:, ID], return_index=True)  # by rank before
    at = np.minimum(np.searchsorted(ids, rows[:, ID]), len(ids) - 1)
    is_spare = (ids[at] == rows[:, ID]) & (rows[:, SHARD] < 0)
    rows = rows.copy()
    rows[is_spare, SHARD] = spares[first[at[is_spare]], SHARD]
    return rows


def _parts(place: MeshPosition, groups: Int, num_parts: int) -> Talk[Int]:
    """[n] part of the step for each row at its home, by its group."""
    if num_parts == 1:
        return np.zeros_like(groups)
    _, borders = yield from select_in_blocks(place, np.unique(groups), partial(first_places, num_parts=num_parts))
    return parts_of(groups, borders)


def _assigned(meeting: Meeting, place: MeshPosition, rows: Int, parts: Int, earlier: EarlierWork | None) -> Talk[Int]:
    """[n] shard of each row at its home: units go to blocks, between blocks, and the answers come back.

    The units of each part, [n] of the rows, are divided separately.
    """
    shards, here, num_parts = meeting.shards, place.block, meeting.action.num_updates
    names = rows[:, GROUP if meeting.action.keep_groups else ID]
    units, unit_of_row = BlockUnits.of(names, rows[:, COST], rows[:, SHARD])
    origin, part_of_unit = np.full_like(units.names, place.number), np.empty_like(units.names)
    # Rows of a group are of one part, and so are those of a unit.
    part_of_unit[unit_of_row] = parts
    columns = np.stack([units.names, units.costs, units.holders, origin, part_of_unit], axis=1)
    begins = first_blocks(units.names, units.holders, shards)
    # To this rank's column of the block: so its ranks share what comes from outside.
    mine = yield from place.route(place.at(begins), columns)
    # Now each rank of the block knows all of its units, so that all of them compute the same.
    block = np.concatenate((yield from place.to_block(mine)))
    begin, end = shards.of_block(here)
    loads = np.zeros((num_parts, shards.count), dtype=np.int64) if earlier is None else earlier.loads
    before = loads[:, begin:end]
    mine_by_part = np.bincount(block[:, 4], weights=block[:, 1], minlength=num_parts).astype(np.int64)
    work = yield from place.across(mine_by_part + before.sum(axis=1))

    def leaving_of(chosen: NDArray[np.bool_]) -> Int:
        part = block[chosen, 4][0]
        of_part = work[:, part]
        share = -(-int(of_part.sum()) // shards.count)
        return leaving(_units(block[chosen]).seen_from(shards, here), flows(of_part, shards, here), share, before[part])

    there = by_part(block[:, 4], leaving_of)
    # All ranks of the block know which units leave it, but only the one that has brought a unit in sends it on.
    stay, go = block[there < 0], np.isin(mine[:, 0], block[there >= 0, 0])
    names_left, to = block[there >= 0, 0], there[there >= 0]
    order = np.argsort(names_left)
    to = to[order][np.searchsorted(names_left[order], mine[go, 0])]
    arrived = yield from place.route(place.at(to), mine[go])
    block = np.concatenate([stay, *(yield from place.to_block(arrived))])
    block = block[np.argsort(block[:, 0])]

    def divided(chosen: NDArray[np.bool_]) -> Int:
        # A row of the loads is a view: what `divide` adds to it counts in the next window.
        before = None if earlier is None else earlier.loads[block[chosen, 4][0]]
        return divide(_units(block[chosen]), shards, here, before)

    owners = by_part(block[:, 4], divided)
    # The rank that brought a unit into its last block sends the answer to the unit's home, whose place is column 3.
    carried = np.concatenate([mine[~go], arrived])
    answers = np.stack([carried[:, 0], owners[np.searchsorted(block[:, 0], carried[:, 0])]], axis=1)
    found = yield from place.route(carried[:, 3], answers)
    # Units are in the order of their names, and so are the answers now.
    shard_of_unit: Int = found[np.argsort(found[:, 0]), 1]
    return shard_of_unit[unit_of_row]


def _units(rows: Int) -> BlockUnits:
    return BlockUnits(rows[:, 0], rows[:, 1], rows[:, 2])


def _news(meeting: Meeting, rows: Int, owners: Int, spares: Int) -> tuple[Int, Int]:
    """For each rank that has or receives rows of a group: [k] its place, and [k, 6] facts about all its rows."""
    facts = rows.copy()
    facts[:, SHARD] = owners
    facts = np.concatenate([facts, spares])
    facts = facts[np.argsort(facts[:, GROUP], kind="stable")]
    groups, begins, counts = np.unique(facts[:, GROUP], return_index=True, return_counts=True)
    per_shard = meeting.target_ranks.shape[1]
    # A rank hears of all rows of a group of which it has or gets some, as it must know who sends the prompt of the
    # group, and to whom.
    number = np.searchsorted(groups, rows[:, GROUP])
    told = np.concatenate([rows[:, RANK], meeting.target_ranks[owners].reshape(-1)])
    pairs = np.unique(np.stack([np.concatenate([number, np.repeat(number, per_shard)]), told], axis=1), axis=0)
    lengths = counts[pairs[:, 0]]
    ends = np.cumsum(lengths)
    # Where the facts of each pair's group lie: begin, begin + 1, ..., one group after the other.
    index = np.arange(int(lengths.sum())) + np.repeat(begins[pairs[:, 0]] - ends + lengths, lengths)
    return np.repeat(meeting.places(pairs[:, 1]), lengths), facts[index]


def _routes(meeting: Meeting, news: Int, first: int) -> RowRoutes:
    """The routes that a rank has received, in the order of ids."""
    news = news[np.argsort(news[:, ID], kind="stable")]
    rows, spares = (news[news[:, KIND] == kind] for kind in (HELD, SPARE))
    ranks, begins = np.unique(np.sort(spares[:, RANK]), return_index=True)
    ids = np.split(spares[np.argsort(spares[:, RANK], kind="stable"), ID], begins[1:])
    near = np.union1d(rows[:, RANK], meeting.target_ranks[rows[:, SHARD]].reshape(-1)).tolist()
    return RowRoutes(
        ids=rows[:, ID],
        group_ids=rows[:, GROUP],
        holders=rows[:, RANK],
        owners=rows[:, SHARD],
        source=meeting.action.source_layout,
        target=meeting.action.target_layout,
        # A rank whose host is unknown is given one of its own, so that nothing is passed on to other ranks there.
        hosts={rank: meeting.hosts.get(rank, -1 - rank) for rank in near},
        spares=dict(zip(ranks.tolist(), ids, strict=False)),
        first_holder=first,
    )
