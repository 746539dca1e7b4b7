"""CPU time and evenness of dividing rows in blocks, against all at once: `python benchmarks/blocks.py`.

Rows with lognormal lengths, eight for each rank, go from the first half of the ranks to the second. Times are those of
one rank: of the last block, and of the assignment of all rows.
"""

from __future__ import annotations

import time

import numpy as np

from leaderless.planner.assign.balance import Int, assign
from leaderless.planner.assign.blocks import (
    BlockUnits,
    Mesh,
    Shards,
    assign_in_blocks,
    divide,
    first_blocks,
    flows,
    leaving,
)

ROWS_PER_RANK = 8


def evenness(costs: Int, owners: Int, num_shards: int) -> float:
    """Work of the fullest shard, in that of the mean."""
    return float(np.bincount(owners, weights=costs, minlength=num_shards).max() * num_shards / costs.sum())


def measure(num_ranks: int) -> str:
    """A line of the table."""
    generator, count = np.random.default_rng(num_ranks), ROWS_PER_RANK * num_ranks
    mesh, dp = Mesh(num_ranks), num_ranks - num_ranks // 2
    shards = Shards.of(mesh, np.arange(num_ranks // 2, num_ranks))
    lengths = np.clip(np.rint(1800 * np.exp(0.8 * generator.standard_normal(count))), 1, 7168).astype(np.int64)
    units = BlockUnits(np.arange(count), lengths, np.full(count, -1, dtype=np.int64))
    begin = time.process_time()
    at_once = assign(units.costs, units.names, units.holders, dp)
    at_once_s = time.process_time() - begin
    blocks, last = first_blocks(units.names, units.holders, shards), mesh.num_blocks - 1
    work = np.bincount(blocks, weights=lengths, minlength=mesh.num_blocks).astype(np.int64)
    mine, (first, end) = units.select(blocks == last), shards.of_block(last)
    begin = time.process_time()
    before = np.zeros(end - first, dtype=np.int64)
    leaving(mine.seen_from(shards, last), flows(work, shards, last), -(-int(work.sum()) // dp), before)
    divide(mine, shards, last, None)
    in_blocks_s = time.process_time() - begin
    even = [evenness(lengths, owners, dp) for owners in (assign_in_blocks(units, shards), at_once)]
    cells = [f"{num_ranks:,}", f"{len(mine.names):,}", f"{1e3 * in_blocks_s:.1f}", f"{even[0]:.4f}"]
    return " | ".join(["", *cells, f"{1e3 * at_once_s:.1f}", f"{even[1]:.4f}", ""]).strip()


if __name__ == "__main__":
    print("| ranks | rows of a block | ms in blocks | fullest/mean | ms at once | fullest/mean |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for num_ranks in (8, 16, 64, 256, 1024, 4096, 16384):
        print(measure(num_ranks))
