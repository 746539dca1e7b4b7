"""Ranks run a model equally often, however uneven their samples are."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.tiny import random_samples

from leaderless.distributed.transport import Transport
from leaderless.training.micro_batches import make_micro_batches

SHARES = {2: [0, 7], 4: [1, 6, 0, 2]}


def cut(shares: list[int]) -> list[int]:
    """Targets of each micro-batch of this rank."""
    transport = Transport(torch.device("cpu"), timeout_s=30)
    count = shares[transport.rank]
    samples = random_samples([(2, 4)] * sum(shares))
    first = sum(shares[: transport.rank])
    pieces = make_micro_batches(samples.select(torch.arange(first, first + count)), 12, transport.world)
    return [len(piece.targets) for piece in pieces]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_number_of_micro_batches_is_agreed_and_short_ranks_add_empty_ones(ranks: RankPool, world_size: int) -> None:
    shares = SHARES[world_size]
    results = ranks.run(world_size, cut, shares)
    most = -(-max(shares) // 2)
    for count, targets in zip(shares, results, strict=True):
        full, odd = divmod(count, 2)
        own = [8] * full + [4] * odd
        assert targets == own + [0] * (most - len(own))
