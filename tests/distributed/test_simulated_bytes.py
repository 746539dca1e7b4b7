"""The simulation's bytes and assignment compared with those of ranks that really exchange rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.counts import counting_traffic
from tests.distributed.ranks import RankPool
from tests.unit.planner.simulate.clusters import network

from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.data.buffer.reshard import reshard
from leaderless.distributed.transport import Transport
from leaderless.planner import Layout, Reshard
from leaderless.planner.simulate.rows import Int, SimulatedRoutes, SimulatedRows, owners_of, sending_ranks
from leaderless.planner.simulate.transfers import parcels_of

SIBLINGS = 4
NUM_PROMPTS = 60
COLUMNS = ("prompt_tokens", "tokens", "response_mask", "old_log_probs", "rewards", "reward_details", "rows")
WORLD_SIZE = 4
RANKS_PER_HOST = 2
TEXT = "x" * 510
"""A text that, with its quotes, has the assumed length of an object."""
EVERYONE = Layout((0, 1, 2, 3), 4)
FIRST, LAST = Layout((0, 1), 2), Layout((2, 3), 2)
BOTH = Layout((2, 3), 1, tp=2)
KINDS: Mapping[str, Reshard] = {
    name: Reshard("rollout", "rollout", COLUMNS, source, target, keep_groups=False, spare_layout=spare)
    for name, source, target, spare in (
        ("from pool to pool", FIRST, LAST, None),
        ("same ranks, the first has most rows", EVERYONE, EVERYONE, None),
        ("to peers on another host, which pass rows on", FIRST, BOTH, None),
        ("ranks hold some rows as replicas", Layout((0, 1, 2, 3), 2, tp=2), EVERYONE, None),
        ("some rows have come before", FIRST, BOTH, LAST),
        ("some rows have come before, and stay where they are", FIRST, Layout((1, 2, 3), 3), LAST),
    )
}


def lengths() -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of prompts and responses, with a heavy tail."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 100, (NUM_PROMPTS,), generator=generator)
    responses = (50 * torch.randn(NUM_PROMPTS * SIBLINGS, generator=generator).exp()).long().clamp(1, 1000)
    return prompts, responses


def shards_of(layout: Layout) -> Int:
    """[n] shard of each row in the source layout; the first has three quarters of them."""
    counts = [NUM_PROMPTS * 3 // 4, *[NUM_PROMPTS // 4 // (layout.dp - 1)] * (layout.dp - 1)]
    return np.repeat(np.repeat(np.arange(layout.dp), counts), SIBLINGS)


def spare_shards() -> Int:
    """[n] shard of each row in the layout to which it was resharded before."""
    return np.repeat(np.arange(NUM_PROMPTS) % 2, SIBLINGS)


def sample_ids() -> torch.Tensor:
    groups = torch.arange(NUM_PROMPTS).repeat_interleave(SIBLINGS)
    return make_sample_ids(groups, torch.arange(SIBLINGS).repeat(NUM_PROMPTS))


def rows_of(layout: Layout | None, shards: Int, rank: int) -> Batch | None:
    """The rows of a rank, and their prompts."""
    if layout is None or rank not in layout:
        return None
    prompts, responses = lengths()
    mine = torch.from_numpy(np.flatnonzero(shards == layout.shard_of(rank)))
    count, total = responses[mine], int(responses[mine].sum())
    groups = torch.unique(mine // SIBLINGS)
    tokens = Jagged(torch.zeros(int(prompts[groups].sum()), dtype=torch.int64), prompts[groups], "prompt_tokens")
    return Batch(
        sample_ids()[mine],
        {
            "tokens": Jagged(torch.zeros(total, dtype=torch.int64), count, "tokens"),
            "response_mask": Jagged(torch.ones(total, dtype=torch.bool), count, "tokens"),
            "old_log_probs": Jagged(torch.zeros(total), count, "response_tokens"),
            "rewards": torch.zeros(len(mine)),
            "reward_details": (TEXT,) * len(mine),
        },
        Batch(groups, {"prompt_tokens": tokens, "rows": (TEXT,) * len(groups)}),
        torch.searchsorted(groups, mine // SIBLINGS),
    )


def exchange(action: Reshard) -> tuple[list[int], int, int]:
    """The rows that this rank receives, and the bytes that it sends and receives."""
    rank = torch.distributed.get_rank()
    transport = Transport(torch.device("cpu"), timeout_s=20, host=f"host {rank // RANKS_PER_HOST}")
    held = rows_of(action.source_layout, shards_of(action.source_layout), rank)
    spare = rows_of(action.spare_layout, spare_shards(), rank)
    with counting_traffic() as traffic:
        arrived = reshard(action, transport.world, held, None, spare if rank in action.target_layout else None)
    return [] if arrived is None else arrived.ids.tolist(), traffic.sent, traffic.received


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_groups", [False, True])
def test_a_simulated_exchange_is_the_real_one(ranks: RankPool, kind: str, keep_groups: bool) -> None:
    action = replace(KINDS[kind], keep_groups=keep_groups)
    real = ranks.run(WORLD_SIZE, exchange, action)
    prompts, responses = (part.numpy() for part in lengths())
    groups = np.repeat(np.arange(NUM_PROMPTS), SIBLINGS)
    rows = SimulatedRows(groups, prompts[groups], responses, are_samples=True)
    source, target, spare = action.source_layout, action.target_layout, action.spare_layout
    holders = sending_ranks(shards_of(source), source)
    known = () if spare is None else [rank for rank in spare.ranks if rank in target]
    spares = {rank: np.flatnonzero(spare_shards() == rank - LAST.ranks[0]) for rank in known}
    owners = owners_of(action, rows, holders, spares)
    links = network(WORLD_SIZE, host__devices=RANKS_PER_HOST)
    moved = parcels_of(
        SimulatedRoutes(rows, holders, owners, source, target, is_agreed=False, spares=spares), COLUMNS, links
    )
    for rank, (arrived, sent, received) in enumerate(real):
        if rank in target:
            assert arrived == sample_ids()[owners == target.shard_of(rank)].tolist()
        assert sent == sum(transfer.sent(WORLD_SIZE)[rank] for transfer in moved.transfers)
        assert received == sum(transfer.received(WORLD_SIZE)[rank] for transfer in moved.transfers)
    assert moved.values.sizes.sum() > 20_000
    assert moved.is_passed_on == (kind == "to peers on another host, which pass rows on")
