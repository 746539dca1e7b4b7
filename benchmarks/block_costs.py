"""What a rank sends and is told until many agree on rows in blocks: `python benchmarks/block_costs.py [MOST_PLAYED]`.

One prompt a rank, eight responses to each, from the first half of the ranks to the second, for four updates. All ranks
of the smaller sizes are played by this process, and what the busiest of them says is counted; for all sizes the model
of `leaderless simulate` says what it is at most.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from math import log2
from pathlib import Path

import numpy as np
from tests.unit.data.test_block_routes import Edge, Heard, even_edge

from leaderless.config import load_section
from leaderless.planner.assign.blocks import LATE_LEGS, NUM_LEGS, ROUNDS_PER_LEG, SELECTION_LEGS, num_messages
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.network import Network
from leaderless.planner.simulate.rows import SimulatedRoutes, SimulatedRows, owners_of
from leaderless.planner.simulate.transfers import agreement_in_blocks, selection_cost

CLUSTER = Path(__file__).parents[1] / "recipes/clusters/h100.yaml"
SIBLINGS, NUM_UPDATES, NUMBER_BYTES = 8, 4, 8
SIZES = (1024, 4096, 16384, 65536)
MOST_PLAYED = 4096


def edge_of(num_ranks: int) -> Edge:
    """The rows of some ranks."""
    edge = even_edge(num_ranks, 2 * SIBLINGS, siblings=SIBLINGS)
    return replace(edge, action=replace(edge.action, num_updates=NUM_UPDATES))


def at_most(edge: Edge, network: Network) -> list[tuple[int, int]]:
    """What the model says of the busiest rank, to agree, to send more columns later, and to select groups.

    Messages that it sends, and bytes that it sends or is told.
    """
    action, ranks = edge.action, np.array(edge.action.ranks)
    rows = SimulatedRows(edge.groups, np.zeros_like(edge.costs), edge.costs, are_samples=True)
    owners = owners_of(action, rows, edge.holders, {})
    new = SimulatedRoutes(rows, edge.holders, owners, action.source_layout, action.target_layout, is_agreed=False)
    moves = [replace(new, num_updates=NUM_UPDATES), replace(new, is_agreed=True)]
    costs = [agreement_in_blocks(routes, ranks, network)[0] for routes in moves]
    targets = np.array(action.target_layout.ranks)
    costs.append(selection_cost(rows, targets[owners], targets, network))
    sizes = len(ranks), len(ranks), len(targets)
    legs = NUM_LEGS + SELECTION_LEGS, LATE_LEGS, SELECTION_LEGS
    return [
        (num_messages(size, some), cost.interface_bytes) for size, some, cost in zip(sizes, legs, costs, strict=True)
    ]


def played(edge: Edge) -> tuple[int, int]:
    """Messages that the busiest rank sends to agree, and bytes that the busiest sends and is told."""
    heard = Heard()
    edge.play(heard=heard)
    return ROUNDS_PER_LEG * heard.messages, NUMBER_BYTES * heard.numbers


def main() -> None:
    """Print the table."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else MOST_PLAYED
    constants = load_section(CLUSTER, ClusterConfig)
    print("| ranks | played: messages | KB | agree: messages | KB | later: messages | KB | select: messages | KB |")
    print("|" + " ---: |" * 9)
    first: list[tuple[int, int]] = []
    for num_ranks in SIZES:
        edge = edge_of(num_ranks)
        found = at_most(edge, Network(constants, num_ranks))
        first = first or found
        messages, size = played(edge) if num_ranks <= most else (None, None)
        counted = "|" if messages is None else f"{messages:,} | {size / 1e3:,.0f}"
        cells = [f"{messages:,} | {size / 1e3:,.0f}" for messages, size in found]
        print(f"| {num_ranks:,} | {counted} | {' | '.join(cells)} |", flush=True)
    powers = [
        f"{log2(there / here) / log2(SIZES[-1] / SIZES[0]):.2f}"
        for pair in zip(first, found, strict=True)
        for here, there in zip(*pair, strict=True)
    ]
    print(f"| exponent | | | {' | '.join(powers)} |")


if __name__ == "__main__":
    main()
