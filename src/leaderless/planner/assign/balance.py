"""The shard of each row: even work first, then few bytes moved; in each part of a step that shares an update."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

EVEN_ENOUGH = 9 / 8
"""Work of the fullest shard, in even shares, up to which rows stay where they are rather than being spread anew."""


def sequence_cost(tokens: Int, quadratic_tokens: int, shared: Int | None = None) -> Int:
    """Relative cost of processing sequences: linear in their lengths, plus attention's square.

    Args:
        tokens: [n] lengths.
        quadratic_tokens: Length at which attention costs as much as all matrix products.
        shared: [n] tokens at the beginning of each that are computed with another sequence; none when None.

    Returns:
        [n] integer costs, so that all ranks agree.
    """
    cost = tokens + tokens * tokens // quadratic_tokens
    return cost if shared is None else cost - sequence_cost(shared, quadratic_tokens)


def is_repeated(units: Int) -> NDArray[np.bool_]:
    """[n] whether an earlier row has the same number."""
    repeated = np.ones(len(units), dtype=np.bool_)
    repeated[np.unique(units, return_index=True)[1]] = False
    return repeated


def distinct(numbers: Int) -> Int:
    """Each number once, ascending; NumPy's `unique` takes many times as long for a million, because it hashes them."""
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), dtype=np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def is_among(numbers: Int, ordered: Int) -> NDArray[np.bool_]:
    """[n] whether each number is among others, which ascend."""
    if not len(ordered):
        return np.zeros(len(numbers), dtype=np.bool_)
    places = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
    return np.equal(ordered[places], numbers)


def assign(costs: Int, units: Int, holders: Int, num_shards: int, before: Int | None = None) -> Int:
    """Assign every row to a shard. Every rank that calls it with the same arguments gets the same result.

    Rows stay with their holder up to an even share; the surplus goes, most costly first, to the shard with the least
    work. If that is too uneven, all rows are reassigned. The fullest shard gets at most the most costly unit, or 4/3 of
    its work under the best assignment (Graham, "Bounds on multiprocessing timing anomalies", 1969).

    Args:
        costs: [n] non-negative.
        units: [n] unit of each row; rows of a unit stay together.
        holders: [n] shard that has the row already, or -1.
        num_shards: Number of shards.
        before: [num_shards] work that shards already have, which counts too; none when None.

    Returns:
        [n] shard of each row.
    """
    names, first, unit_of_row = np.unique(units, return_index=True, return_inverse=True)
    unit_costs = np.zeros(len(names), dtype=np.int64)
    np.add.at(unit_costs, unit_of_row, costs)
    if not len(names):
        return unit_of_row
    dearest_first = np.lexsort((names, -unit_costs))
    unit_costs, unit_holders = unit_costs[dearest_first], holders[first][dearest_first]
    loads = np.zeros(num_shards, dtype=np.int64) if before is None else before
    share = -(-int(unit_costs.sum() + loads.sum()) // num_shards)

    owners = _kept(unit_costs, unit_holders, share, loads.tolist())
    fullest = _fullest(unit_costs, owners)
    if before is None and fullest > max(int(unit_costs[0]), EVEN_ENOUGH * share):
        spread = _spread(unit_costs, unit_holders, num_shards)
        if _fullest(unit_costs, spread) < fullest:
            owners = spread
    by_name = np.empty_like(owners)
    by_name[dearest_first] = owners
    return by_name[unit_of_row]


def _fullest(costs: Int, owners: Int) -> int:
    return int(np.bincount(owners, weights=costs).max())


def kept(costs: Int, holders: Int, share: int, loads: list[int]) -> Int:
    """[n] holders of units, most costly first, that keep them up to an even share; -1 for other units.

    A holder with nothing else keeps a unit above an even share.
    """
    owners = np.full(len(costs), -1, dtype=np.int64)
    for unit, (holder, cost) in enumerate(zip(holders.tolist(), costs.tolist(), strict=True)):
        if holder >= 0 and (loads[holder] + cost <= share or not loads[holder]):
            owners[unit] = holder
            loads[holder] += cost
    return owners


def _kept(costs: Int, holders: Int, share: int, loads: list[int]) -> Int:
    """Owners of units, most costly first: the holder up to an even share, then the shard with the least work.

    Units above an even share come first, each on a shard of its own, before other units fill the shards.
    """
    work, owners = costs.tolist(), [-1] * len(costs)
    num_dear = int((costs > share).sum())
    surplus: list[int] = []
    for unit, (holder, cost) in enumerate(zip(holders.tolist(), work, strict=True)):
        if unit == num_dear:
            surplus = _place(surplus, work, owners, loads)
        if holder >= 0 and (loads[holder] + cost <= share or (unit < num_dear and not loads[holder])):
            owners[unit] = holder
            loads[holder] += cost
        else:
            surplus.append(unit)
    _place(surplus, work, owners, loads)
    return np.array(owners, dtype=np.int64)


def _place(units: list[int], costs: list[int], owners: list[int], loads: list[int]) -> list[int]:
    """Assign all units to the shards with the least work."""
    heap = [(load, shard) for shard, load in enumerate(loads)]
    heapq.heapify(heap)
    for unit in units:
        load, shard = heap[0]
        owners[unit] = shard
        loads[shard] = load + costs[unit]
        heapq.heapreplace(heap, (loads[shard], shard))
    return []


def _spread(costs: Int, holders: Int, num_shards: int) -> Int:
    """Owners of units, most costly first, each to the heap with least work; a heap goes to the holder of most of it."""
    placed = [0] * len(costs)
    _place(list(range(len(costs))), costs.tolist(), placed, [0] * num_shards)
    heaps = np.array(placed, dtype=np.int64)
    held = np.flatnonzero(holders >= 0)
    pairs, index = np.unique(heaps[held] * num_shards + holders[held], return_inverse=True)
    dearest_first = np.lexsort((pairs, -np.bincount(index, weights=costs[held], minlength=len(pairs))))
    shard_of = np.full(num_shards, -1, dtype=np.int64)
    is_taken = np.zeros(num_shards, dtype=np.bool_)
    for pair in pairs[dearest_first].tolist():
        heap, holder = divmod(pair, num_shards)
        if shard_of[heap] < 0 and not is_taken[holder]:
            shard_of[heap] = holder
            is_taken[holder] = True
    shard_of[shard_of < 0] = np.flatnonzero(~is_taken)
    return shard_of[heaps]


NO_GROUP = np.iinfo(np.int64).max
"""Stands for the group at a place after the last one."""


class EarlierWork(NamedTuple):
    """Work of shards in earlier windows of a step whose other groups are unknown.

    Attributes:
        loads: [parts, shards] work of each part; what shards get in this window is added.
        num_groups: Groups of the step. Their ids are their positions in the data, so that the part of each is known.
    """

    loads: Int
    num_groups: int

    def parts_of(self, groups: Int) -> Int:
        """[n] part of each group, [n]."""
        parts: Int = groups % self.num_groups * len(self.loads) // self.num_groups
        return parts


def first_places(num_groups: int, num_parts: int) -> Int:
    """[num_parts - 1] place of the first group of every part but the first; group i is in part i * parts // groups."""
    places: Int = -(np.arange(-1, -num_parts, -1, dtype=np.int64) * num_groups // num_parts)
    return places


def parts_of(groups: Int, borders: Int) -> Int:
    """[n] part of each group, [n], from the first group of every part but the first."""
    return np.searchsorted(borders, groups, side="right").astype(np.int64)


def by_part(parts: Int, assign_some: Callable[[NDArray[np.bool_]], Int]) -> Int:
    """[n] owners, found for one part after the other by a function that takes which rows are in it."""
    owners = np.empty_like(parts)
    for part in np.unique(parts).tolist():
        chosen = parts == part
        owners[chosen] = assign_some(chosen)
    return owners


def at_places(groups: Int, places: Int) -> Int:
    """[k] group at each place of some groups in ascending order, or NO_GROUP behind the last."""
    found: Int = np.append(groups, NO_GROUP)[np.minimum(places, len(groups))]
    return found
