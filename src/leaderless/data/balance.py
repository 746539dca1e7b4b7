"""Which shard gets which row: even work first, then few bytes moved."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

QUADRATIC_TOKENS = 24_576
"""Length at which attention costs as much as all matrix products: about 12 times the hidden size, here of 2,048."""


def sequence_cost(tokens: Int) -> Int:
    """Relative cost of processing sequences: linear in length, plus attention's square.

    Args:
        tokens: [n] lengths.

    Returns:
        [n], integers so that all ranks compute the same.
    """
    return tokens + tokens * tokens // QUADRATIC_TOKENS


def assign(costs: Int, units: Int, holders: Int, num_shards: int) -> Int:
    """Give every row to a shard. Every rank that calls it with the same arguments gets the same answer.

    Rows stay with their holder up to an even share; what is over goes, dearest first, to the shard with least work.

    Args:
        costs: [n] non-negative.
        units: [n] rows with the same number stay together.
        holders: [n] shard that has the row already, or -1.
        num_shards: Shards to give rows to.

    Returns:
        [n] shard of each row.
    """
    names, first, unit_of_row = np.unique(units, return_index=True, return_inverse=True)
    unit_costs = np.zeros(len(names), dtype=np.int64)
    np.add.at(unit_costs, unit_of_row, costs)
    unit_holders = holders[first]
    share = -(-int(unit_costs.sum()) // num_shards)

    owners = np.full(len(names), -1, dtype=np.int64)
    loads = [0] * num_shards
    dearest_first = np.lexsort((names, -unit_costs))
    surplus: list[int] = []
    for unit in dearest_first.tolist():
        holder, cost = int(unit_holders[unit]), int(unit_costs[unit])
        if holder >= 0 and loads[holder] + cost <= share:
            owners[unit] = holder
            loads[holder] += cost
        else:
            surplus.append(unit)
    heap = [(load, shard) for shard, load in enumerate(loads)]
    heapq.heapify(heap)
    for unit in surplus:
        load, shard = heap[0]
        owners[unit] = shard
        heapq.heapreplace(heap, (load + int(unit_costs[unit]), shard))
    return owners[unit_of_row]
