"""Bytes and cost of one reshard, and the cost of sending new weights to serving ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

import numpy as np

from leaderless.planner import SyncWeights
from leaderless.planner.assign.balance import distinct
from leaderless.planner.assign.blocks import (
    LATE_LEGS,
    NUM_LEGS,
    ROUNDS_PER_LEG,
    SELECTION_LEGS,
    Mesh,
    Shards,
    is_in_blocks,
    num_messages,
)
from leaderless.planner.assign.routes import RowRoutes as DatabufferRoutes
from leaderless.planner.memory.limits import DEVICE_WEIGHT_BUCKET_BYTES, PIECE_BYTES, ROUND_BYTES, ROUNDS_AHEAD
from leaderless.planner.simulate.network import MICRO, Network, NetworkTransfer, seconds, sums
from leaderless.planner.simulate.rows import LENGTH_BYTES, Int, SimulatedRoutes, SimulatedRows

TYPES_BYTES = 24
"""Facts that ranks of a node compare before rows are sent: digests of types and ids, and the number of rows."""
COMPARED_BYTES = 32
"""Facts about a block when its ranks have compared: ranks that differ, and a digest of types."""
FACT_BYTES = 24
"""Id, group and cost of a row, which all ranks gather."""
ROUTED_BYTES = 56
"""Facts that a rank sends about a row, or receives, with the rank that it is for."""
UNIT_BYTES = 40
"""Number, cost, holder, origin and update of what a block divides."""
ID_BYTES = 8
"""Id of a row that a rank holds from before, or wants because it holds others of its columns."""
SCHEMA_BYTES = 64
"""About what a column's name and type take as text."""
SUMS_PER_UPDATE = 3
"""The number of passes, the counts by which losses are divided, and the loss."""
PLANNING_BYTES_PER_ROW = 208
"""Facts as they arrive and joined, and what the assignment works with: 204 bytes a row at the peak, measured."""


@dataclass(frozen=True)
class Cost:
    """Cost of one reshard: time between the arrivals of the last rank and of the last row, and bytes.

    `interface_bytes` go through the busiest network interface, in and out together; `process_bytes` are memory of the
    busiest process, above what it held before.
    """

    seconds: float
    interface_bytes: int
    process_bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds,
            self.interface_bytes + other.interface_bytes,
            max(self.process_bytes, other.process_bytes),
        )


@dataclass(frozen=True)
class Parcels:
    """The messages of one change of layout, and what it leaves on each rank.

    Attributes:
        lengths: Lengths of ragged rows, which are sent first: straight from their senders, then passed on by peers.
        values: Bytes of columns, passed on or not.
        largest_bytes: Values of the largest parcel.
        kept: [num_ranks] bytes of values that each rank has already and copies.
        arriving: [num_ranks] memory of each rank's rows under the target layout, those that it keeps included.
    """

    lengths: tuple[NetworkTransfer, NetworkTransfer]
    values: NetworkTransfer
    largest_bytes: int
    kept: Int
    arriving: Int

    @property
    def is_passed_on(self) -> bool:
        """Whether a peer passes on what it has received."""
        return self.lengths[1].sizes.size > 0

    @property
    def transfers(self) -> tuple[NetworkTransfer, ...]:
        """All messages."""
        return (*self.lengths, self.values)

    def interface_bytes(self, network: Network) -> int:
        """Bytes through the busiest interface, in and out together."""
        return int(np.max(sum(sum(network.interface_bytes(transfer)) for transfer in self.transfers)))


def parcels_of(routes: SimulatedRoutes, columns: Sequence[str], network: Network) -> Parcels:
    """Rows that every rank of the target layout gets, found as the ranks themselves find it."""
    rows, count, real = routes.rows, network.num_ranks, _as_in_databuffer(routes, network)
    of_rows, of_prompts = real.deliveries(routes.target.ranks)
    # Rows of a group are neighbors: the first of them stands for its prompt.
    prompts = np.searchsorted(rows.groups, real.prompts)[of_prompts.places]
    holders = np.concatenate([of_rows.senders, of_prompts.senders])
    receivers = np.concatenate([of_rows.receivers, of_prompts.receivers])
    origins = _origins(real, holders, receivers)
    of_prompt = rows.prompt_bytes(columns)[prompts]
    values = np.concatenate([rows.row_bytes(columns)[of_rows.places], of_prompt])
    held = np.concatenate([rows.held_bytes(columns)[of_rows.places], of_prompt])
    lengths = LENGTH_BYTES * np.repeat(rows.num_lengths(columns), [len(of_rows.places), len(prompts)])
    straight, is_here = origins == holders, holders == receivers
    first, second, moved = NetworkTransfer.several(origins, receivers, lengths * straight, lengths * ~straight, values)
    parcels = moved if straight.all() else NetworkTransfer.of(holders, receivers, values)
    return Parcels(
        lengths=(first, second),
        values=moved,
        largest_bytes=int(parcels.sizes.max(initial=0)),
        kept=sums(receivers[is_here], values[is_here], count),
        arriving=sums(receivers, held, count),
    )


def _as_in_databuffer(routes: SimulatedRoutes, network: Network) -> DatabufferRoutes:
    """The routes as the ranks of a reshard compute them; rows are numbered."""
    return DatabufferRoutes(
        ids=np.arange(len(routes.rows)),
        group_ids=routes.rows.groups,
        holders=routes.holders,
        owners=routes.owners,
        source=routes.source,
        target=routes.target,
        hosts=dict(enumerate(network.hosts(np.arange(network.num_ranks)).tolist())),
        spares=routes.spares,
    )


def _origins(real: DatabufferRoutes, holders: Int, receivers: Int) -> Int:
    """[k] rank from which each row or prompt comes: its holder, or a peer of the receiver."""
    if real.target.ranks_per_shard == 1:
        return holders
    span = int(receivers.max(initial=0)) + 1
    pairs, of_pair = np.unique(holders * span + receivers, return_inverse=True)
    return np.array([real.relay(*divmod(pair, span)) for pair in pairs.tolist()], dtype=np.int64)[of_pair]


def peer_cost(routes: SimulatedRoutes, columns: Sequence[str], ranks: Int, network: Network) -> Cost:
    """Cost of a reshard: agree, assign, send lengths, then values piece by piece, column by column."""
    count, per_row_us = network.num_ranks, network.cluster.coordinator.assignment_us_per_row
    parcels, (agreement, known, divided) = parcels_of(routes, columns, network), _agreement(routes, ranks, network)
    # Two broadcasts: ranks that have received pass on, so that each hop doubles their number.
    depth = ceil(log2(len(ranks)))
    agreement += _hops(2 * depth, depth * (8 + SCHEMA_BYTES * len(columns)), ranks, network)
    assignment = 0.0 if routes.is_agreed else divided * per_row_us * MICRO
    lengths = sum(network.transfer_seconds(leg) for leg in parcels.lengths)
    piece = min(max(ROUND_BYTES // len(ranks), PIECE_BYTES[0]), PIECE_BYTES[1])
    # What is not contiguous in memory goes through buffers, one for each piece and round in flight.
    sizes = np.minimum(parcels.values.sizes, ROUNDS_AHEAD * piece)
    staged = NetworkTransfer(parcels.values.senders, parcels.values.receivers, sizes)
    held = parcels.arriving + staged.sent(count) + staged.received(count)
    return Cost(
        seconds=agreement.seconds + assignment + lengths + _streaming_seconds(parcels, piece, network),
        interface_bytes=agreement.interface_bytes + parcels.interface_bytes(network),
        process_bytes=PLANNING_BYTES_PER_ROW * known + int(held.max()),
    )


def put_cost(ranks: Int, network: Network) -> Cost:
    """Cost of comparing, on all ranks of a node, what is about to be sent.

    In blocks, ranks hear of their block, and then one row of each block. Ranks of a shard are few and not counted.
    """
    if is_in_blocks(len(ranks)):
        width = Mesh(len(ranks)).width
        return _hops(2 * ROUNDS_PER_LEG * width, 2 * (ID_BYTES + COMPARED_BYTES) * width, ranks, network)
    return _gathers([TYPES_BYTES], ranks, network)


def updates_cost(rows: SimulatedRows, holders: Int, num_updates: int, ranks: Int, network: Network) -> Cost:
    """Cost of agreement among training ranks: on the first groups of a step's updates, and on sums at each update."""
    sums_of_updates = num_updates * SUMS_PER_UPDATE
    num_hops = 2 * Mesh(len(ranks)).width if is_in_blocks(len(ranks)) else 2 * (len(ranks) - 1)
    cost = _hops(sums_of_updates * num_hops, sums_of_updates * num_hops * ID_BYTES, ranks, network)
    return cost if num_updates == 1 else cost + selection_cost(rows, holders, ranks, network)


def selection_cost(rows: SimulatedRows, holders: Int, ranks: Int, network: Network) -> Cost:
    """Cost of finding the groups with which updates begin, from the ids of those that each rank has."""
    span = int(rows.groups[-1]) + 1
    most = int(np.bincount(distinct(holders * span + rows.groups) // span).max())
    if is_in_blocks(len(ranks), SELECTION_LEGS):
        num_hops = num_messages(len(ranks), SELECTION_LEGS)
        return _hops(num_hops, 2 * 2 * ID_BYTES * most + ID_BYTES * num_hops, ranks, network)
    return _gathers([ID_BYTES * most], ranks, network)


def _streaming_seconds(parcels: Parcels, piece: int, network: Network) -> float:
    """Rows that stay are copied first; then buffers are filled and emptied while the round before is sent."""
    link, values, count = network.cluster.links.device, parcels.values, network.num_ranks
    kept = seconds(int(parcels.kept.max()), link.bandwidth_gb_per_s)
    most = int((values.sent(count) + values.received(count)).max())
    num_rounds = ceil(parcels.largest_bytes / piece) + ROUNDS_AHEAD * parcels.is_passed_on
    latency = network.latency_seconds(values) * max(ceil(num_rounds / ROUNDS_AHEAD) - 1, 0)
    carried = max(network.transfer_seconds(values), seconds(most, link.bandwidth_gb_per_s))
    return 2 * link.latency_us * MICRO + kept + latency + carried


def _agreement(routes: SimulatedRoutes, ranks: Int, network: Network) -> tuple[Cost, int, int]:
    """Cost of saying who has rows and who gets them; rows that the busiest rank hears of, and that it divides."""
    if is_in_blocks(len(ranks)):
        return agreement_in_blocks(routes, ranks, network)
    gathered = [FACT_BYTES * int(np.bincount(routes.holders).max())]
    if routes.spares:
        gathered.append(ID_BYTES * max(map(len, routes.spares.values())))
    if routes.is_agreed:
        gathered.append(ID_BYTES * int(np.bincount(routes.owners).max()))
    return _gathers(gathered, ranks, network), len(routes.rows), len(routes.rows)


def agreement_in_blocks(routes: SimulatedRoutes, ranks: Int, network: Network) -> tuple[Cost, int, int]:
    """Cost of agreeing in blocks; rows that the busiest rank hears of, and that it divides.

    Rows of groups are routed to a rank of each group and back, and blocks divide the rows of their shards. Everything
    goes through two ranks on its way, and counts with what the busiest rank has or gets.
    """
    mesh = Mesh(len(ranks))
    first_ranks = np.array(routes.target.ranks)[:: routes.target.ranks_per_shard]
    blocks = Shards.of(mesh, np.searchsorted(ranks, first_ranks)).blocks(routes.owners)
    divided = 0 if routes.is_agreed else int(np.bincount(blocks).max())
    said = int(np.bincount(routes.holders).max()) + max(map(len, routes.spares.values()), default=0)
    if routes.is_agreed:
        said += int(np.bincount(routes.owners).max())
    heard = _heard(routes)
    routed = 2 * (ROUTED_BYTES * (said + heard) + UNIT_BYTES * 2 * said)
    legs = LATE_LEGS if routes.is_agreed else NUM_LEGS + SELECTION_LEGS * (routes.num_updates > 1)
    num_messages_sent = num_messages(len(ranks), legs)
    num_bytes = routed + UNIT_BYTES * divided + ID_BYTES * num_messages_sent
    return _hops(num_messages_sent, num_bytes, ranks, network), heard + divided, divided


def _heard(routes: SimulatedRoutes) -> int:
    """Rows of which the busiest rank hears: all of the groups of which it has rows, or gets some."""
    groups, owners = routes.rows.groups, routes.owners * routes.target.ranks_per_shard
    told = np.concatenate([routes.holders, np.array(routes.target.ranks)[owners]])
    span = int(told.max(initial=0)) + 1
    pairs = distinct(np.concatenate([groups, groups]) * span + told)
    return int(sums(pairs % span, np.bincount(groups)[pairs // span], span).max(initial=0))


def _gathers(gathered: Sequence[int], ranks: Int, network: Network) -> Cost:
    """Every gather is a sum of counts and a gather of values, padded to the longest, around a ring of all ranks."""
    # A sum goes round the ring twice and a gather once.
    num_hops = 3 * (len(ranks) - 1) * len(gathered)
    return _hops(num_hops, sum(16 + num_bytes for num_bytes in gathered) * len(ranks), ranks, network)


def _hops(num_hops: int, num_bytes: int, ranks: Int, network: Network) -> Cost:
    """Hops one after the other, with `num_bytes` through each rank in total."""
    if len(ranks) < 2:
        return Cost(0.0, 0, 0)
    coordinator = network.cluster.coordinator
    took = num_hops * coordinator.hop_latency_us * MICRO + seconds(num_bytes, coordinator.hop_bandwidth_gb_per_s)
    is_between_hosts = len(np.unique(network.hosts(ranks))) > 1
    return Cost(took, 2 * num_bytes * is_between_hosts, 0)


def difference_share(changed: float, width: int) -> float:
    """Expected bytes of differences of weights, as a share of the bytes of all, if numbers change independently.

    A gap of unchanged numbers is geometric. With codes of a byte, it has one more code for each 255 of them: on average
    q / (1 - q) more, with q = (1 - changed)^255; with codes of two bytes, one more for each 65,535. A bit for each
    number is the alternative; see `leaderless.distributed.weights`.
    """
    gaps = (size * changed / (1 - (1 - changed) ** most) for size, most in ((1, 255), (2, 65535)))
    return min(1.0, changed + min(*gaps, 1 / 8) / width)


def weights_cost(
    action: SyncWeights,
    num_bytes: int,
    network: Network,
    *,
    is_gathered: bool,
    sent_share: float = 1.0,
    gathered_share: float = 1.0,
) -> Cost:
    """Cost of new weights: each row goes straight from the rank that trains it to one that wants it.

    Ranks that want whole weights then gather what each has received. Of differences, only a share of the bytes is sent,
    and of some gathered; ranks read all weights and those before, to compare them or to add to them.
    """
    sources, targets = (np.array(layout.ranks) for layout in (action.source_layout, action.target_layout))
    borders = [num_bytes * np.arange(len(ranks) + 1) // len(ranks) for ranks in (sources, targets)]
    cuts = np.unique(np.concatenate(borders))
    begins, sizes = cuts[:-1], np.diff(cuts)
    senders = sources[np.searchsorted(borders[0], begins, side="right") - 1]
    receivers = targets[np.searchsorted(borders[1], begins, side="right") - 1]
    whole = NetworkTransfer.of(senders, receivers, sizes)
    transfer = replace(whole, sizes=np.ceil(sent_share * whole.sizes).astype(np.int64))
    num_rounds = ceil(num_bytes / DEVICE_WEIGHT_BUCKET_BYTES)
    latency = network.latency_seconds(transfer) * (ceil(num_rounds / ROUNDS_AHEAD) - 1)
    link, count = network.cluster.links.device, network.num_ranks
    sent, received = whole.sent(count), whole.received(count)
    held = min(ROUNDS_AHEAD * DEVICE_WEIGHT_BUCKET_BYTES, int((sent + received).max()))
    # All ranks make bytes of weights that go, and weights of bytes that have come, at the same time.
    # Weights before are in host memory, so that as many bytes come from there, too.
    num_read = (int(sent.max()) + int(received.max())) * (2 if sent_share < 1 else 1)
    packed = 2 * link.latency_us * MICRO + seconds(num_read, link.bandwidth_gb_per_s)
    took = latency + network.transfer_seconds(transfer) + packed
    if is_gathered:
        took += network.gather_seconds(num_bytes * gathered_share, targets)
    if gathered_share < 1:  # each rank reads the weights before, writes the new ones, and reads them for the checksum
        took += seconds(3 * num_bytes, network.cluster.device.memory_bandwidth_gb_per_s)
    return Cost(took, int(np.max(sum(network.interface_bytes(transfer)))), held)
