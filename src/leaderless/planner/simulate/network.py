"""Seconds and bytes of what goes between ranks, over links inside a host and over the interfaces of hosts."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.rows import Int

Float = NDArray[np.float64]

GIGA = 1e9
MICRO = 1e-6


@dataclass(frozen=True)
class NetworkTransfer:
    """Messages between ranks: [m] the rank that sends each, another rank that receives it, and its bytes."""

    senders: Int
    receivers: Int
    sizes: Int

    @classmethod
    def of(cls, senders: Int, receivers: Int, sizes: Int) -> NetworkTransfer:
        """One message for each pair of ranks that has something to send, and none from a rank to itself."""
        return cls.several(senders, receivers, sizes)[0]

    @classmethod
    def several(cls, senders: Int, receivers: Int, *sizes: Int) -> tuple[NetworkTransfer, ...]:
        """As `of`, for each of some sizes; pairs are sorted once."""
        moves = senders != receivers
        span = int(senders.max(initial=0)) + 1
        # Receivers mostly ascend, and the sort that NumPy chooses with an index takes half the time then.
        pairs, _, pair = np.unique(receivers[moves] * span + senders[moves], return_index=True, return_inverse=True)
        whole = (sums(pair, some[moves], len(pairs)) for some in sizes)
        return tuple(cls(pairs[total > 0] % span, pairs[total > 0] // span, total[total > 0]) for total in whole)

    def sent(self, num_ranks: int) -> Int:
        """[num_ranks] bytes that each rank sends."""
        return sums(self.senders, self.sizes, num_ranks)

    def received(self, num_ranks: int) -> Int:
        """[num_ranks] bytes that each rank receives."""
        return sums(self.receivers, self.sizes, num_ranks)


@dataclass(frozen=True)
class Network:
    """The links of a cluster, between the ranks of a run, which fill hosts one after another."""

    cluster: ClusterConfig
    num_ranks: int

    def hosts(self, ranks: Int) -> Int:
        """[n] host of each rank."""
        return ranks // self.cluster.host.devices

    def interfaces(self, ranks: Int) -> Int:
        """[n] interface of each rank, numbered through all hosts."""
        return ranks * self.cluster.host.interfaces // self.cluster.host.devices

    def crosses(self, transfer: NetworkTransfer) -> NDArray[np.bool_]:
        """[m] whether a message goes to another host."""
        crosses: NDArray[np.bool_] = self.hosts(transfer.senders) != self.hosts(transfer.receivers)
        return crosses

    def interface_bytes(self, transfer: NetworkTransfer) -> tuple[Int, Int]:
        """Bytes out of and into each interface."""
        crosses = self.crosses(transfer)
        sizes = transfer.sizes[crosses]
        count = int(self.interfaces(np.array([self.num_ranks - 1]))[0]) + 1
        out = sums(self.interfaces(transfer.senders[crosses]), sizes, count)
        return out, sums(self.interfaces(transfer.receivers[crosses]), sizes, count)

    def transfer_seconds(self, transfer: NetworkTransfer) -> float:
        """Seconds until the last message arrives: latency of the rank with most messages, bytes of the fullest link.

        Links inside hosts and between them work at the same time.
        """
        links, crosses = self.cluster.links, self.crosses(transfer)
        across = max(int(part.max()) for part in self.interface_bytes(transfer))
        inside = NetworkTransfer(transfer.senders[~crosses], transfer.receivers[~crosses], transfer.sizes[~crosses])
        within = max(int(inside.sent(self.num_ranks).max()), int(inside.received(self.num_ranks).max()))
        carried = max(seconds(across, links.network.bandwidth_gb_per_s), seconds(within, links.host.bandwidth_gb_per_s))
        return self.latency_seconds(transfer) + carried

    def latency_seconds(self, transfer: NetworkTransfer) -> float:
        """The part of `transfer_seconds` that does not depend on bytes."""
        peers = max(int(np.bincount(ends, minlength=1).max()) for ends in (transfer.senders, transfer.receivers))
        links = self.cluster.links
        level = links.network if self.crosses(transfer).any() else links.host
        return peers * level.latency_us * MICRO

    def gather_seconds(self, num_bytes: float, ranks: Int) -> float:
        """Seconds of an all-gather, or a reduce-scatter, of a model's weights, cut in even parts.

        Rings over all interfaces of a host carry it; the small steps between grow with the logarithm of the ranks.
        """
        if len(ranks) < 2:
            return 0.0
        links, hosts = self.cluster.links, np.unique(self.hosts(ranks))
        link, bandwidth = links.host, links.host.bandwidth_gb_per_s
        if len(hosts) > 1:
            link = links.network
            shared = np.unique(self.interfaces(ranks)).size / len(hosts)
            within = bandwidth if len(ranks) > len(hosts) else np.inf
            bandwidth = min(within, link.bandwidth_gb_per_s * shared)
        share = 1 - 1 / len(ranks)
        return ceil(log2(len(ranks))) * link.latency_us * MICRO + seconds(num_bytes * share, bandwidth)

    def exchange_seconds(self, num_bytes: float, ranks: Int) -> float:
        """Seconds until every rank has sent an even part of some bytes to each of the others."""
        if len(ranks) < 2:
            return 0.0
        links, num_hosts = self.cluster.links, len(np.unique(self.hosts(ranks)))
        per_rank = np.unique(self.interfaces(ranks)).size / len(ranks)
        across = seconds(num_bytes * (1 - 1 / num_hosts), links.network.bandwidth_gb_per_s * per_rank)
        within = seconds(num_bytes * max(0.0, 1 / num_hosts - 1 / len(ranks)), links.host.bandwidth_gb_per_s)
        link = links.network if num_hosts > 1 else links.host
        return (len(ranks) - 1) * link.latency_us * MICRO + max(across, within)


def seconds(num_bytes: float, gb_per_s: float) -> float:
    """Seconds that some bytes take."""
    return num_bytes / (gb_per_s * GIGA)


def sums(places: Int, sizes: Int, count: int) -> Int:
    """[count] sum of the sizes at each place; exact below 2 ** 53."""
    return np.bincount(places, weights=sizes, minlength=count).astype(np.int64)
