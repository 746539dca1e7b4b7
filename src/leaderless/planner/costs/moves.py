"""What one reshard costs, and what new weights cost on their way to serving ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from leaderless.planner import SyncWeights
from leaderless.planner.costs.network import MICRO, Network, Transfer, seconds
from leaderless.planner.costs.parcels import Parcels, parcels_of
from leaderless.planner.costs.placement import Routes
from leaderless.planner.costs.rows import Int
from leaderless.planner.memory import WEIGHT_BUCKET_BYTES

TYPES_BYTES = 24
"""What ranks of a node compare before rows travel: digests of types and ids, and the number of rows."""
FACT_BYTES = 24
"""Id, group and cost of a row, which all ranks gather."""
ID_BYTES = 8
"""Id of a row that a rank holds from before, or wants because it holds others of its columns."""
SCHEMA_BYTES = 64
"""A column's name and type as text, about."""
PLANNING_BYTES_PER_ROW = 208
"""Facts as they arrive and joined, and what the assignment works with: 204 bytes a row at the peak, measured."""
ROUND_BYTES, PIECE_BYTES, ROUNDS_AHEAD = 1 << 25, (1 << 16, 1 << 22), 2
"""Bytes of a round to all peers and to one, and rounds under way, as in `leaderless.data.transfer`."""


@dataclass(frozen=True)
class Cost:
    """Cost of one reshard.

    Attributes:
        seconds: Time between the arrivals of the last rank and of the last row.
        interface_bytes: Bytes through the busiest network interface, in and out together.
        process_bytes: Memory of the busiest process, above what it held before.
    """

    seconds: float
    interface_bytes: int
    process_bytes: int

    def __add__(self, other: Cost) -> Cost:
        """Cost of one after the other."""
        return Cost(
            self.seconds + other.seconds,
            self.interface_bytes + other.interface_bytes,
            max(self.process_bytes, other.process_bytes),
        )


def peer_cost(routes: Routes, columns: Sequence[str], ranks: Int, network: Network) -> Cost:
    """Cost of a reshard: agree, assign, send lengths, then values piece by piece, column by column.

    Args:
        routes: Routes of the rows.
        columns: Columns that travel.
        ranks: Ranks that take part.
        network: Links between the ranks.
    """
    cluster, count = network.cluster, network.num_ranks
    parcels = parcels_of(routes, columns, network)
    agreement = _agreement(routes, columns, ranks, network)
    assignment = 0.0 if routes.is_agreed else len(routes.rows) * cluster.coordinator.assignment_us_per_row * MICRO
    lengths = sum(network.transfer_seconds(leg) for leg in parcels.lengths)
    piece = min(max(ROUND_BYTES // len(ranks), PIECE_BYTES[0]), PIECE_BYTES[1])
    # What does not lie together in memory goes through buffers, one for each piece and round under way.
    sizes = np.minimum(parcels.values.sizes, ROUNDS_AHEAD * piece)
    staged = Transfer(parcels.values.senders, parcels.values.receivers, sizes)
    held = parcels.arriving + staged.sent(count) + staged.received(count)
    return Cost(
        seconds=agreement.seconds + assignment + lengths + _streaming_seconds(parcels, piece, network),
        interface_bytes=agreement.interface_bytes + parcels.interface_bytes(network),
        process_bytes=PLANNING_BYTES_PER_ROW * len(routes.rows) + int(held.max()),
    )


def put_cost(ranks: Int, network: Network) -> Cost:
    """Cost of comparing, on all ranks of a node, what is about to travel.

    Args:
        ranks: Ranks of the node.
        network: Links between the ranks.
    """
    return _gathers([TYPES_BYTES], ranks, network)


def _streaming_seconds(parcels: Parcels, piece: int, network: Network) -> float:
    """Rows that stay are copied first; then buffers are filled and emptied while the round before travels."""
    link, values, count = network.cluster.links.device, parcels.values, network.num_ranks
    kept = seconds(int(parcels.kept.max()), link.bandwidth_gb_per_s)
    most = int((values.sent(count) + values.received(count)).max())
    num_rounds = ceil(parcels.largest_bytes / piece) + ROUNDS_AHEAD * parcels.is_passed_on
    latency = network.latency_seconds(values) * max(ceil(num_rounds / ROUNDS_AHEAD) - 1, 0)
    carried = max(network.transfer_seconds(values), seconds(most, link.bandwidth_gb_per_s))
    return 2 * link.latency_us * MICRO + kept + latency + carried


def _packing_seconds(transfer: Transfer, network: Network) -> float:
    """Making bytes of weights that go, and weights of what has come; ranks do so at the same time."""
    link, count = network.cluster.links.device, network.num_ranks
    most = int(transfer.sent(count).max()) + int(transfer.received(count).max())
    return 2 * link.latency_us * MICRO + seconds(most, link.bandwidth_gb_per_s)


def _agreement(routes: Routes, columns: Sequence[str], ranks: Int, network: Network) -> Cost:
    """A gather of facts about rows, and a broadcast of columns by the lowest rank that has rows."""
    gathered = [FACT_BYTES * int(np.bincount(routes.holders).max())]
    if routes.spares:
        gathered.append(ID_BYTES * max(map(len, routes.spares.values())))
    if routes.is_agreed:
        gathered.append(ID_BYTES * int(np.bincount(routes.owners).max()))
    sent = _broadcasts([8, SCHEMA_BYTES * len(columns)], ranks, network)
    return _gathers(gathered, ranks, network) + sent


def _gathers(gathered: Sequence[int], ranks: Int, network: Network) -> Cost:
    """Every gather is a sum of counts and a gather of values, padded to the longest, around a ring of all ranks."""
    count = len(ranks)
    # A sum goes round the ring twice and a gather once.
    num_hops = 3 * (count - 1) * len(gathered)
    total = sum(2 * 8 * count + num_bytes * count for num_bytes in gathered)
    return _hops(num_hops, total, ranks, network)


def _broadcasts(sizes: Sequence[int], ranks: Int, network: Network) -> Cost:
    """Ranks that have received pass on: each hop doubles their number."""
    depth = ceil(log2(len(ranks)))
    return _hops(depth * len(sizes), depth * sum(sizes), ranks, network)


def _hops(num_hops: int, num_bytes: int, ranks: Int, network: Network) -> Cost:
    """Hops one after the other, with some bytes in all through each rank."""
    if len(ranks) < 2:
        return Cost(0.0, 0, 0)
    coordinator = network.cluster.coordinator
    took = num_hops * coordinator.hop_latency_us * MICRO + seconds(num_bytes, coordinator.hop_bandwidth_gb_per_s)
    is_between_hosts = len(np.unique(network.hosts(ranks))) > 1
    return Cost(took, 2 * num_bytes * is_between_hosts, 0)


def weights_cost(action: SyncWeights, num_parameters: int, network: Network) -> Cost:
    """Cost of new weights: each row goes straight from the rank that trains it to the rank that serves it.

    Args:
        action: Entry of the chain.
        num_parameters: Weights of the model, which travel as float32.
        network: Links between the ranks.
    """
    num_bytes = 4 * num_parameters
    sources, targets = (np.array(layout.ranks) for layout in (action.source_layout, action.target_layout))
    borders = [num_bytes * np.arange(len(ranks) + 1) // len(ranks) for ranks in (sources, targets)]
    cuts = np.unique(np.concatenate(borders))
    begins, sizes = cuts[:-1], np.diff(cuts)
    senders = sources[np.searchsorted(borders[0], begins, side="right") - 1]
    receivers = targets[np.searchsorted(borders[1], begins, side="right") - 1]
    transfer = Transfer.of(senders, receivers, sizes)
    num_rounds = ceil(num_bytes / WEIGHT_BUCKET_BYTES)
    latency = network.latency_seconds(transfer) * (ceil(num_rounds / ROUNDS_AHEAD) - 1)
    out, into = network.interface_bytes(transfer)
    most = int((transfer.sent(network.num_ranks) + transfer.received(network.num_ranks)).max())
    held = min(ROUNDS_AHEAD * WEIGHT_BUCKET_BYTES, most)
    took = latency + network.transfer_seconds(transfer) + _packing_seconds(transfer, network)
    return Cost(took, int((out + into).max()), held)
