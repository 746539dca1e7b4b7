"""Ranks find out together which host's network is slow."""

from __future__ import annotations

import time
from unittest.mock import patch

import torch
from tests.distributed.ranks import RankPool

from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.worker.replan import replanner

SLOW_RANKS = {2, 3}


def slow_hosts() -> list[dict[int, float]]:
    """What this rank finds if all hosts are quick, and if what goes to one of them, or comes from it, takes time."""
    rank = Transport(torch.device("cpu"), timeout_s=20).rank
    world = Transport(torch.device("cpu"), timeout_s=20, host=f"host {min(rank, 2)}").world
    exchange = ProcessGroup.exchange

    def slowly(self: ProcessGroup, messages: dict[int, torch.Tensor], *rest: object) -> object:
        is_slow = SLOW_RANKS & {self.rank, *messages} and len(next(iter(messages.values()))) > 1
        time.sleep(0.4 if is_slow else 0.0)
        return exchange(self, messages, *rest)  # type: ignore[arg-type]

    found = replanner.find_slow_links(world)
    with patch.object(ProcessGroup, "exchange", slowly):
        return [dict(links.byte_s) for links in (found, replanner.find_slow_links(world))]


def test_ranks_agree_on_the_host_whose_network_is_slow(ranks: RankPool) -> None:
    first, *others = ranks.run(4, slow_hosts)
    assert all(other == first for other in others)
    assert list(first[1]) == [2]
    assert first[1][2] > 0.3 / replanner.NUM_BYTES
