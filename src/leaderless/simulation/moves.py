"""What one transition costs: rows straight from rank to rank, or through a single controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from leaderless.planner import SyncWeights
from leaderless.simulation.cluster import ControllerConfig
from leaderless.simulation.network import MICRO, Network, Transfer, seconds
from leaderless.simulation.placement import Routes
from leaderless.simulation.rows import Int, Rows

DIGEST_BYTES = 24
"""What a rank tells of its columns before a change of layout."""
FACT_BYTES = 24
"""Id, group and cost of a row, which ranks tell each other."""
CLAIM_BYTES = 8
"""Id of a row that a rank wants because it has others of its columns."""
PLANNING_BYTES_PER_ROW = 192
"""Facts as they arrive and joined, and what `assign` works with: 143 bytes a row at its peak, measured."""
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


def transfer_of(routes: Routes, columns: Sequence[str]) -> Transfer:
    """The bytes between ranks: rows to every rank of their shard, and each prompt once to each shard.

    Args:
        routes: Of the rows.
        columns: That travel.
    """
    sizes, prompts = routes.rows.row_bytes(columns), routes.rows.prompt_bytes(columns)
    if prompts.any():
        # Of all who send samples of a prompt to a shard, the lowest rank sends the prompt.
        order = np.lexsort((routes.holders, routes.owners, routes.rows.groups))
        groups, owners = routes.rows.groups[order], routes.owners[order]
        is_first = (np.diff(groups, prepend=-1) != 0) | (np.diff(owners, prepend=-1) != 0)
        sizes[order[is_first]] += prompts[order[is_first]]
    size = routes.target.ranks_per_shard
    receivers = np.array(routes.target.ranks).reshape(-1, size)[routes.owners]
    return Transfer.of(np.repeat(routes.holders, size), receivers.reshape(-1), np.repeat(sizes, size))


def peer_cost(routes: Routes, columns: Sequence[str], ranks: Int, network: Network) -> Cost:
    """The project's own way: agree, assign, pack, send straight to the new owner, unpack.

    Args:
        routes: Of the rows.
        columns: That travel.
        ranks: That take part.
        network: Between them.
    """
    cluster, transfer = network.cluster, transfer_of(routes, columns)
    sent, received = transfer.sent(network.num_ranks), transfer.received(network.num_ranks)
    agreement = _agreement(routes, ranks, network)
    assignment = 0.0 if routes.is_agreed else len(routes.rows) * cluster.coordinator.assignment_us_per_row * MICRO
    # Ranks tell each other the sizes of their messages first.
    sizes = Transfer(transfer.senders, transfer.receivers, np.full_like(transfer.sizes, 8))
    carried = network.transfer_seconds(sizes) + network.transfer_seconds(transfer)
    out, into = network.interface_bytes(transfer)
    return Cost(
        seconds=agreement.seconds + assignment + _packing_seconds(transfer, network) + carried,
        interface_bytes=agreement.interface_bytes + int((out + into).max()),
        process_bytes=PLANNING_BYTES_PER_ROW * len(routes.rows) + int((sent + 2 * received).max()),
    )


def _packing_seconds(transfer: Transfer, network: Network) -> float:
    """Making bytes of what goes, and rows or weights of what has come; ranks do so at the same time."""
    link, count = network.cluster.links.device, network.num_ranks
    most = int(transfer.sent(count).max()) + int(transfer.received(count).max())
    return 2 * link.latency_us * MICRO + seconds(most, link.bandwidth_gb_per_s)


def _agreement(routes: Routes, ranks: Int, network: Network) -> Cost:
    """Every gather is a sum of counts and a gather of values, both around a ring of all ranks."""
    if len(ranks) < 2:
        return Cost(0.0, 0, 0)
    coordinator, count = network.cluster.coordinator, len(ranks)
    most_held = int(np.bincount(routes.holders).max())
    most_wanted = int(np.bincount(routes.owners).max()) if routes.is_agreed else 0
    gathered = (DIGEST_BYTES, FACT_BYTES * most_held, CLAIM_BYTES * most_wanted)
    # A sum goes round a ring twice and a gather once; what ranks gather is padded to the longest.
    num_hops = 3 * (count - 1) * len(gathered)
    total = sum(2 * 8 * count + num_bytes * count for num_bytes in gathered)
    took = num_hops * coordinator.hop_latency_us * MICRO + seconds(total, coordinator.hop_bandwidth_gb_per_s)
    is_between_hosts = len(np.unique(network.hosts(ranks))) > 1
    return Cost(took, 2 * total * is_between_hosts, 0)


@dataclass(frozen=True)
class Controller:
    """A single process on the first host. Each row travels with a prompt of its own.

    Attributes:
        config: Its costs.
        network: Between it and the ranks.
    """

    config: ControllerConfig
    network: Network

    def bytes_of(self, rows: Rows, columns: Sequence[str]) -> Int:
        """[n] bytes of each row, padded if it pads.

        Args:
            rows: All of them.
            columns: That travel.
        """
        return rows.separate_bytes(columns, is_padded=self.config.pads_rows)

    def exchange(self, sizes: Int, ranks: Int) -> Cost:
        """Take rows from ranks, or give them some; it costs the same.

        Each rank makes bytes of its own rows, and the controller objects of all, which it joins; or it orders all rows
        and makes bytes of them, and each rank objects of its own.

        Args:
            sizes: [n] bytes of each row.
            ranks: [n] that give or get them.
        """
        config, link = self.config, self.network.cluster.links.network
        of_rank = np.bincount(ranks, weights=sizes, minlength=self.network.num_ranks).astype(np.int64)
        is_remote = self.network.hosts(np.arange(len(of_rank))) > 0
        total, remote = int(of_rank.sum()), int(of_rank[is_remote].sum())
        if not total:
            return Cost(0.0, 0, 0)
        took = config.call_us * MICRO * int((of_rank > 0).sum()) + seconds(total, config.copy_gb_per_s)
        took += seconds(total + int(of_rank.max()), config.serialization_gb_per_s)
        took += seconds(total, config.object_store_gb_per_s)
        bandwidth = min(link.bandwidth_gb_per_s, config.network_gb_per_s or link.bandwidth_gb_per_s)
        took += link.latency_us * MICRO * bool(remote) + seconds(remote, bandwidth)
        # Parts and the whole that is made of them, and what the object store holds meanwhile.
        copies = 2 + (config.object_store_gb_per_s is not None)
        return Cost(took, remote, copies * total)


def controller_cost(routes: Routes, columns: Sequence[str], controller: Controller) -> Cost:
    """One transition through a controller that has none of its columns yet.

    Args:
        routes: Of the rows.
        columns: That travel.
        controller: Through which.
    """
    sizes, size = controller.bytes_of(routes.rows, columns), routes.target.ranks_per_shard
    receivers = np.array(routes.target.ranks).reshape(-1, size)[routes.owners].reshape(-1)
    gathered = controller.exchange(sizes, routes.holders)
    return gathered + controller.exchange(np.repeat(sizes, size), receivers)


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
    empty = Transfer(transfer.senders, transfer.receivers, np.zeros_like(transfer.sizes))
    latency = network.transfer_seconds(empty) * (2 * ceil(num_bytes / WEIGHT_BUCKET_BYTES) - 1)
    out, into = network.interface_bytes(transfer)
    most = int((transfer.sent(network.num_ranks) + transfer.received(network.num_ranks)).max())
    held = min(2 * WEIGHT_BUCKET_BYTES, most)
    took = latency + network.transfer_seconds(transfer) + _packing_seconds(transfer, network)
    return Cost(took, int((out + into).max()), held)
