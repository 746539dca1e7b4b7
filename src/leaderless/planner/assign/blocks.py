"""Rows and shards in blocks: with too many rows for every rank to know them all, each block of ranks divides its own.

A unit of rows begins in the block of the shard that has it, or else in a block that follows from its number. The blocks
compare the sums of their work, and blocks with a surplus give it to blocks with too little. Then each block divides its
units, as `assign` does where all ranks know all rows. All of this is arithmetic on facts that the ranks of a block
share.

    block        0     1     2     3      as many shards in each
    work         100   40    90    10     an even share is 60
    surplus      |-------- 0 --------|------ 2 -----|      40 and 30, end to end
    lack         |--- 1 ---|----------- 3 ----------|      20 and 50, end to end

What lies above each other is given: block 0 gives 20 to block 1 and 20 to block 3, and block 2 gives 30 to block 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.assign.balance import Int, assign, kept

HOME, SHARD = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
"""Odd multipliers that spread numbers over ranks and over shards, independently of each other."""
NUM_LEGS = 15
"""Number of times a rank sends to the rest of its block, or to one rank of each block, until rows are agreed on."""
LATE_LEGS = 6
"""The same where all rows are wanted, so that there is nothing to divide."""
SELECTION_LEGS = 8
"""Legs until the groups at given positions among all groups are known."""
ROUNDS_PER_LEG = 2
"""Sizes, then contents."""
EVEN = 64
"""Divisor of the mean work: a block's fullest shard is left alone if its excess over the mean is at most this part."""
MAX_EXCHANGES = 4
"""Most exchanges between a block's shards, per shard."""
HOPS_PER_RANK = 3
"""Hops of one gather among all ranks, per rank: a sum goes round the ring twice, the rows once."""


def is_in_blocks(num_ranks: int, num_legs: int = NUM_LEGS) -> bool:
    """Whether a number of legs in blocks takes fewer consecutive messages than one gather among all ranks."""
    return num_messages(num_ranks, num_legs) < HOPS_PER_RANK * (num_ranks - 1)


def num_messages(num_ranks: int, num_legs: int = NUM_LEGS) -> int:
    """Number of messages that a rank sends in some legs, by default those until rows are agreed on in blocks."""
    return num_legs * ROUNDS_PER_LEG * Mesh(num_ranks).width


@dataclass(frozen=True)
class Mesh:
    """Ranks, by their places from 0, in blocks of neighbors; there are about as many blocks as ranks in a block.

    Block sizes differ by at most one rank. Where a block has one rank less, its first rank also has the last column.
    """

    num_ranks: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return isqrt(self.num_ranks)

    @property
    def width(self) -> int:
        """Ranks of the largest block."""
        return -(-self.num_ranks // self.num_blocks)

    @cached_property
    def begins(self) -> Int:
        """[num_blocks + 1] first place of each block, and the number of ranks."""
        return np.arange(self.num_blocks + 1, dtype=np.int64) * self.num_ranks // self.num_blocks

    def blocks(self, places: Int) -> Int:
        """[n] block of each place."""
        found: Int = np.searchsorted(self.begins, places, side="right") - 1
        return found

    def members(self, block: int) -> range:
        """The places of a block."""
        return range(int(self.begins[block]), int(self.begins[block + 1]))

    def columns(self, places: Int) -> Int:
        """[n] column of each place."""
        return places - self.begins[self.blocks(places)]

    def at(self, blocks: Int | int, columns: Int | int) -> Int:
        """The place of each block that has a column."""
        blocks, columns = np.asarray(blocks), np.asarray(columns)
        # In a block with one rank less, the first rank stands in for the column that is missing.
        begins = self.begins[blocks]
        found: Int = begins + np.where(columns < self.begins[blocks + 1] - begins, columns, 0)
        return found

    def below(self, place: int) -> Int:
        """The places that this place sends to across blocks, in its columns."""
        block = int(self.blocks(np.array([place]))[0])
        column, size = place - int(self.begins[block]), len(self.members(block))
        played = [column, self.width - 1] if column == 0 and size < self.width else [column]
        found = [self.begins[:-1] + one for one in played]
        # Those of the last column are only in blocks that are wide enough.
        inside = [places[places < self.begins[1:]] for places in found]
        return np.unique(np.concatenate(inside))

    def above(self, place: int) -> Int:
        """The places that send to this place across blocks, one per block, in order."""
        return self.at(np.arange(self.num_blocks), int(self.columns(np.array([place]))[0]))


@dataclass(frozen=True)
class Shards:
    """The shards of a layout in the blocks of a mesh: [num_blocks + 1] first shard of each block, and their number."""

    begins: Int

    @classmethod
    def of(cls, mesh: Mesh, first_places: Int) -> Shards:
        """Put each shard into the block of its first rank; [dp] place of that rank, ascending."""
        return cls(np.searchsorted(first_places, mesh.begins).astype(np.int64))

    @property
    def count(self) -> int:
        """Number of all shards."""
        return int(self.begins[-1])

    def of_block(self, block: int) -> tuple[int, int]:
        """The first shard of a block, and the one after its last."""
        return int(self.begins[block]), int(self.begins[block + 1])

    def blocks(self, shards: Int) -> Int:
        """[n] block of each shard."""
        found: Int = np.searchsorted(self.begins, shards, side="right") - 1
        return found


@dataclass(frozen=True)
class BlockUnits:
    """Units of rows: [n] name and cost of each, and the shard that has it, or -1."""

    names: Int
    costs: Int
    holders: Int

    @classmethod
    def of(cls, names: Int, costs: Int, holders: Int) -> tuple[BlockUnits, Int]:
        """Join rows, [n], of the same name; a unit is where its first row is. Also returns [n] unit of each row."""
        units, first, unit_of_row = np.unique(names, return_index=True, return_inverse=True)
        sums = np.zeros(len(units), dtype=np.int64)
        np.add.at(sums, unit_of_row, costs)
        return cls(units, sums, holders[first]), unit_of_row

    def select(self, index: Int | NDArray[np.bool_]) -> BlockUnits:
        """Some units."""
        return BlockUnits(self.names[index], self.costs[index], self.holders[index])

    def seen_from(self, shards: Shards, block: int) -> BlockUnits:
        """The same units with the shards of a block counted from its first, and no other holders."""
        begin, end = shards.of_block(block)
        is_here = (self.holders >= begin) & (self.holders < end)
        # A shard of another block cannot keep a unit here, so that its unit is free to move.
        return BlockUnits(self.names, self.costs, np.where(is_here, self.holders - begin, -1))


def spread(numbers: Int, factor: int, count: int) -> Int:
    """[n] a place below `count` for each number, spread evenly, and the same on every rank."""
    # The low bits of a product hardly mix, and numbers are often consecutive: the high bits choose.
    mixed = numbers.astype(np.uint64) * np.uint64(factor)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(factor)
    return ((mixed >> np.uint64(33)) % np.uint64(count)).astype(np.int64)


def first_blocks(names: Int, holders: Int, shards: Shards) -> Int:
    """[n] block in which each unit begins."""
    return shards.blocks(np.where(holders < 0, spread(names, SHARD, shards.count), holders))


def flows(work: Int, shards: Shards, block: int) -> Int:
    """[k, 2] the blocks that a block gives work to, and about how much.

    Args:
        work: [num_blocks] work of each block.
        shards: Shards of the blocks, which should have even work.
        block: Block that gives.
    """
    # A block's even share is in proportion to its shards.
    excess = work - int(work.sum()) * np.diff(shards.begins) // max(1, shards.count)
    has, lacks = np.maximum(excess, 0), np.maximum(-excess, 0)
    end = int(has[: block + 1].sum())
    begins, ends = np.cumsum(lacks) - lacks, np.cumsum(lacks)
    amounts = np.minimum(ends, end) - np.maximum(begins, end - int(has[block]))
    chosen = np.flatnonzero(amounts > 0)
    return np.stack([chosen, amounts[chosen]], axis=1)


def leaving(units: BlockUnits, given: Int, share: int, before: Int) -> Int:
    """[n] block to which each unit of a block goes, or -1: the given work, in units that no shard here keeps.

    Args:
        units: Units of the block, their holders counted from the first shard of the block.
        given: [k, 2] blocks and work, of `flows`.
        share: Even share of a shard, over all blocks.
        before: [shards of the block] work that shards already have.
    """
    destinations = np.full(len(units.names), -1, dtype=np.int64)
    if not len(given):
        return destinations
    # Names decide between equal costs, so that all ranks of the block choose the same units.
    dearest_first = np.lexsort((units.names, -units.costs))
    # What a shard may keep does not leave: moving it would only cost bytes.
    is_kept = kept(units.costs[dearest_first], units.holders[dearest_first], share, before.tolist()) >= 0
    free = dearest_first[~is_kept].tolist()
    costs, left = units.costs.tolist(), given[:, 1].tolist()
    # The dearest first, as long as they fit: then few units move, and cheap ones fill what is left.
    for unit in free:
        most = max(range(len(left)), key=left.__getitem__)
        if costs[unit] <= left[most]:
            destinations[unit] = given[most, 0]
            left[most] -= costs[unit]
    for unit in reversed(free):  # the cheapest, where more than half of it is missing
        most = max(range(len(left)), key=left.__getitem__)
        if destinations[unit] < 0 and costs[unit] < 2 * left[most]:
            destinations[unit] = given[most, 0]
            left[most] -= costs[unit]
    return destinations


def divide(units: BlockUnits, shards: Shards, block: int, loads: Int | None) -> Int:
    """[n] shard of each unit of a block; the loads of the block's shards grow by the units they get."""
    begin, end = shards.of_block(block)
    here = units.seen_from(shards, block)
    before = None if loads is None else loads[begin:end]
    owners = assign(here.costs, here.names, here.holders, end - begin, before)
    owners = begin + evened(here, owners, np.zeros(end - begin, dtype=np.int64) if before is None else before)
    # `assign` and `evened` count earlier work, and add nothing to it.
    if loads is not None:
        np.add.at(loads, owners, units.costs)
    return owners


def evened(units: BlockUnits, owners: Int, before: Int) -> Int:
    """[n] owners after exchanges of the fullest shard with other shards, until its work is even or cannot shrink.

    A block has fewer cheap units than all ranks together, so assignment alone evens out the costly ones less well.
    """
    order, num_shards = np.argsort(units.names), len(before)
    costs = units.costs[order]
    # A unit may also move without another in exchange.
    places = np.concatenate([owners[order], np.arange(num_shards)])
    prices = np.concatenate([costs, np.zeros(num_shards, dtype=np.int64)])
    shards = places[: len(costs)]  # a view
    loads = before + np.bincount(shards, weights=costs, minlength=num_shards).astype(np.int64)
    enough = int(loads.sum()) // num_shards * (EVEN + 1) // EVEN
    # Each exchange makes the fullest shard smaller, but perhaps by little: the bound keeps the time in proportion to
    # the shards.
    for _ in range(MAX_EXCHANGES * num_shards):
        fullest = int(loads.argmax())
        most, mine = int(loads[fullest]), np.flatnonzero(shards == fullest)
        if most <= enough or not len(mine):  # earlier work is not exchanged
            break
        given = costs[mine][:, None]
        # [mine, others] work of the fuller of both shards after each exchange.
        # An exchange within the fullest shard leaves it at least as full as it is, so that none is chosen.
        after = np.maximum(prices + (most - given), (loads[places] - prices) + given)
        # Whatever gets close to the mean is good enough: among these, bytes decide.
        least = max(int(after.min()), enough)
        if least >= most:
            break
        best, others = np.divmod(np.flatnonzero(after <= least), len(prices))
        # Of equally good exchanges, the one that moves least.
        chosen = (costs[mine[best]] + prices[others]).argmin()
        unit, other = mine[best[chosen]], others[chosen]
        place, gain = places[other], costs[unit] - prices[other]
        if other < len(costs):
            shards[other] = fullest
        shards[unit] = place
        loads[fullest] -= gain
        loads[place] += gain
    # Units were sorted by name, so that the result does not depend on the order in which they have come.
    result = np.empty_like(owners)
    result[order] = shards
    return result


def assign_in_blocks(units: BlockUnits, shards: Shards) -> Int:
    """[n] shard of every unit, as the ranks of all blocks compute it together."""
    blocks = first_blocks(units.names, units.holders, shards)
    num_blocks = len(shards.begins) - 1
    work = np.bincount(blocks, weights=units.costs, minlength=num_blocks).astype(np.int64)
    share = -(-int(work.sum()) // shards.count)
    moved = blocks.copy()
    for block, here in enumerate(_by_block(blocks, num_blocks)):
        begin, end = shards.of_block(block)
        nothing = np.zeros(end - begin, dtype=np.int64)
        there = leaving(units.select(here).seen_from(shards, block), flows(work, shards, block), share, nothing)
        moved[here[there >= 0]] = there[there >= 0]
    owners = np.empty(len(blocks), dtype=np.int64)
    for block, here in enumerate(_by_block(moved, num_blocks)):
        if len(here):
            owners[here] = divide(units.select(here), shards, block, None)
    return owners


def _by_block(blocks: Int, num_blocks: int) -> list[Int]:
    """The places of each block, ascending."""
    order = np.argsort(blocks, kind="stable")
    return np.split(order, np.searchsorted(blocks[order], np.arange(1, num_blocks)))
