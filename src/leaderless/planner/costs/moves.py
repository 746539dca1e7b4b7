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

TYPES_BYTES = 24
"""What a rank tells its node's others of rows that are about to travel: digests of types and ids, and their number."""
FACT_BYTES = 24
"""Id, group and cost of a row, which ranks tell each other."""
ID_BYTES = 8
"""Id of a row that a rank has got before, or wants because it has others of its columns."""
SCHEMA_BYTES = 64
"""A column's name and type as text, about."""
PLANNING_BYTES_PER_ROW = 208
"""Facts as they arrive and joined, and what the assignment works with: 204 bytes a row at the peak, measured."""
ROUND_BYTES, PIECE_BYTES, ROUNDS_AHEAD = 1 << 25, (1 << 16, 1 << 22), 2
"""How `leaderless.data.transfer` cuts what goes to all peers and to one, and how many rounds are under way."""
WEIGHT_BUCKET_BYTES = 1 << 28
"""Weights travel in buckets of this size, as `leaderless.training.weight_sync` sends them."""


@dataclass(frozen=True)
class Cost:
    """Of one transition.

    Attributes:
        seconds: From the last rank's arrival to the last row's.
        interface_bytes: Through the busiest network interface, in and out together.
        process_bytes: Memory of the busiest process, above what it held before.
    """

    seconds: float
    interface_bytes: int
    process_bytes: int

    def __add__(self, other: Cost) -> Cost:
        """One behind the other."""
        return Cost(
            self.seconds + other.seconds,
            self.interface_bytes + other.interface_bytes,
            max(self.process_bytes, other.process_bytes),
        )


def peer_cost(routes: Routes, columns: Sequence[str], ranks: Int, network: Network) -> Cost:
    """The project's own way: agree, assign, send lengths, then values in pieces, from column to column.

    Args:
        routes: Of the rows.
        columns: That travel.
        ranks: That take part.
        network: Between them.
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
    """A node's ranks compare what is about to travel.

    Args:
        ranks: Of the node.
        network: Between them.
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
    """What ranks tell each other of rows, and the lowest rank with rows all others of columns."""
    gathered = [FACT_BYTES * int(np.bincount(routes.holders).max())]
    if routes.spares:
        gathered.append(ID_BYTES * max(map(len, routes.spares.values())))
    if routes.is_agreed:
        gathered.append(ID_BYTES * int(np.bincount(routes.owners).max()))
    told = _broadcasts([8, SCHEMA_BYTES * len(columns)], ranks, network)
    return _gathers(gathered, ranks, network) + told


def _gathers(gathered: Sequence[int], ranks: Int, network: Network) -> Cost:
    """Every gather is a sum of counts and a gather of values, padded to the longest, around a ring of all ranks."""
    count = len(ranks)
    # A sum goes round the ring twice and a gather once.
    num_hops = 3 * (count - 1) * len(gathered)
    total = sum(2 * 8 * count + num_bytes * count for num_bytes in gathered)
    return _told(num_hops, total, ranks, network)


def _broadcasts(sizes: Sequence[int], ranks: Int, network: Network) -> Cost:
    """Ranks that know pass it on: after every hop, twice as many know."""
    depth = ceil(log2(len(ranks)))
    return _told(depth * len(sizes), depth * sum(sizes), ranks, network)


def _told(num_hops: int, num_bytes: int, ranks: Int, network: Network) -> Cost:
    """Hops one behind the other, with so many bytes in all through each rank."""
    if len(ranks) < 2:
        return Cost(0.0, 0, 0)
    coordinator = network.cluster.coordinator
    took = num_hops * coordinator.hop_latency_us * MICRO + seconds(num_bytes, coordinator.hop_bandwidth_gb_per_s)
    is_between_hosts = len(np.unique(network.hosts(ranks))) > 1
    return Cost(took, 2 * num_bytes * is_between_hosts, 0)


def weights_cost(action: SyncWeights, num_parameters: int, network: Network) -> Cost:
    """Weights from the ranks that train to those that serve, each row straight to who holds it there.

    Args:
        action: The entry of the chain.
        num_parameters: Of the model; they travel as float32.
        network: Between the ranks.
    """
    num_bytes = 4 * num_parameters
    sources, targets = (np.array(layout.ranks) for layout in (action.source_layout, action.target_layout))
    borders = [num_bytes * np.arange(len(ranks) + 1) // len(ranks) for ranks in (sources, targets)]
    cuts = np.unique(np.concatenate(borders))
    begins, sizes = cuts[:-1], np.diff(cuts)
    senders = sources[np.searchsorted(borders[0], begins, side="right") - 1]
    receivers = targets[np.searchsorted(borders[1], begins, side="right") - 1]
    transfer = Transfer.of(senders, receivers, sizes)
    # Every bucket is an exchange of its own: sizes first, then bytes.
    latency = network.latency_seconds(transfer) * (2 * ceil(num_bytes / WEIGHT_BUCKET_BYTES) - 1)
    out, into = network.interface_bytes(transfer)
    most = int((transfer.sent(network.num_ranks) + transfer.received(network.num_ranks)).max())
    held = min(2 * WEIGHT_BUCKET_BYTES, most)
    took = latency + network.transfer_seconds(transfer) + _packing_seconds(transfer, network)
    return Cost(took, int((out + into).max()), held)
