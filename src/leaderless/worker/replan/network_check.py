"""Tests the network between hosts while a run goes on."""

from __future__ import annotations

import time

import torch

from leaderless.distributed.transport import ProcessGroup
from leaderless.planner.placement.slow_links import Links, find_slow, pairs_in_rounds

NUM_BYTES = 2 << 20
"""Bytes that either host of a pair sends."""
WHAT = "the test of the network"


def find_slow_links(world: ProcessGroup) -> Links:
    """Find hosts whose network is slow. All ranks of the world call it together.

    Hosts form a circle, and the first rank of each exchanges bytes with the first ranks of its two
    neighbors. Each rank gets the seconds of every pair.
    """
    firsts: dict[int, int] = {}
    for rank in world.ranks:
        firsts.setdefault(world.hosts[rank], rank)
    order = sorted(firsts.values())
    pair_s = torch.zeros(len(order), dtype=torch.float64)
    for pairs in pairs_in_rounds(len(order)):
        for host in pairs:
            pair = order[host], order[(host + 1) % len(order)]
            if world.rank in pair:
                pair_s[host] = _seconds_with(pair[1] if world.rank == pair[0] else pair[0], world)
    agreed = world.max(pair_s, WHAT).tolist()
    places = {world.hosts[rank]: place for place, rank in enumerate(order)}
    return find_slow({rank: places[world.hosts[rank]] for rank in world.ranks}, agreed, NUM_BYTES)


def _seconds_with(peer: int, world: ProcessGroup) -> float:
    """Seconds of an exchange with another rank, after both have met."""
    world.exchange({peer: torch.zeros(1, dtype=torch.uint8)}, [peer], WHAT)
    begin = time.perf_counter()
    world.exchange({peer: torch.zeros(NUM_BYTES, dtype=torch.uint8)}, [peer], WHAT)
    return time.perf_counter() - begin
