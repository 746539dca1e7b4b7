"""Hosts whose network has become slow, as all ranks have agreed on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

LEAST_S = 0.01
"""Seconds of a test below which no host counts as slow."""
MUCH_SLOWER = 4.0
"""A host is slow if its test takes this many times as long as the median host's."""


@dataclass(frozen=True)
class Links:
    """The seconds that a byte takes to a slow host and from it.

    Attributes:
        hosts: Number of each rank's host.
        byte_s: Seconds of a byte by host, where the host is slow.
    """

    hosts: Mapping[int, int] = field(default_factory=dict)
    byte_s: Mapping[int, float] = field(default_factory=dict)

    def of(self, ranks: Iterable[int]) -> float:
        """Seconds of a byte among some ranks: the rate of their slowest host, if they are on several."""
        if not self.byte_s:
            return 0.0
        hosts = {self.hosts[rank] for rank in ranks}
        return max((self.byte_s.get(host, 0.0) for host in hosts), default=0.0) if len(hosts) > 1 else 0.0

    def sending(self, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Seconds of a byte that each target receives, from some of the sources: at the rate of the slowest host.

        What goes out of a slow host does so once for each target elsewhere; each target on it receives its own.
        """
        seconds = [0.0]
        for host, byte_s in self.byte_s.items():
            here = sum(self.hosts[rank] == host for rank in sources) / len(sources)
            num_here = sum(self.hosts[rank] == host for rank in targets)
            seconds.append(byte_s * (here * (len(targets) - num_here) + (1 - here) * num_here))
        return max(seconds)


def find_slow(hosts: Mapping[int, int], pair_s: Sequence[float], num_bytes: int) -> Links:
    """Which hosts are slow.

    Each host is tested with the one before it and the one after it, and is as fast as the faster test. So a slow host
    shows if its neighbors are not slow as well; two hosts alone cannot be distinguished.

    Args:
        hosts: Number of each rank's host.
        pair_s: Seconds of a test between each host and the next one, in a circle.
        num_bytes: Bytes that each of the two has sent in the test.
    """
    best = [min(pair_s[host], pair_s[host - 1]) for host in range(len(pair_s))]
    limit = max(LEAST_S, MUCH_SLOWER * median(best)) if best else LEAST_S
    return Links(hosts, {host: seconds / num_bytes for host, seconds in enumerate(best) if seconds > limit})


def pairs_in_rounds(num_hosts: int) -> list[list[int]]:
    """The pairs of a circle of hosts, each by its first host, in rounds in which no host has two tests."""
    if num_hosts < 2:
        return []
    if num_hosts == 2:
        return [[0]]
    even, odd = list(range(0, num_hosts - 1, 2)), list(range(1, num_hosts - 1 + (num_hosts + 1) % 2, 2))
    return [even, odd] if num_hosts % 2 == 0 else [even, odd, [num_hosts - 1]]
