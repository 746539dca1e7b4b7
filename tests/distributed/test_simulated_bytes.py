"""The simulation's bytes and assignment against those of ranks that really exchange rows."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from tests.distributed.ranks import RankPool

from leaderless.data.batch import Batch, Jagged
from leaderless.data.ids import make_sample_ids
from leaderless.data.reshard import reshard
from leaderless.data.transport import Transport
from leaderless.planner import Layout, Reshard
from leaderless.simulation.moves import transfer_of
from leaderless.simulation.placement import Routes, owners_of
from leaderless.simulation.rows import Rows

SIBLINGS = 4
NUM_PROMPTS = 60
COLUMNS = ("prompt_tokens", "tokens", "response_mask", "old_log_probs", "rewards")
WORLD_SIZE = 4
Kind = Literal["pools", "skewed"]


def action_of(kind: Kind, *, keep_groups: bool) -> Reshard:
    everyone = Layout(tuple(range(WORLD_SIZE)), WORLD_SIZE)
    source, target = (Layout((0, 1), 2), Layout((2, 3), 2)) if kind == "pools" else (everyone, everyone)
    return Reshard("rollout", "rollout", COLUMNS, source, target, keep_groups)


def lengths() -> tuple[torch.Tensor, torch.Tensor]:
    """Of prompts and responses, with a heavy tail."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 100, (NUM_PROMPTS,), generator=generator)
    responses = (50 * torch.randn(NUM_PROMPTS * SIBLINGS, generator=generator).exp()).long().clamp(1, 1000)
    return prompts, responses


def holders_of(kind: Kind) -> np.ndarray:
    """[n] rank of each row; in `skewed` the first rank has half of them."""
    counts = [30, 30] if kind == "pools" else [30, 10, 10, 10]
    return np.repeat(np.repeat(np.arange(len(counts)), counts), SIBLINGS)


def exchange(kind: Kind, keep_groups: bool) -> tuple[list[int], int, int]:
    """The rows that this rank gets, and the bytes that it sends and receives."""
    transport = Transport(torch.device("cpu"), timeout_s=20)
    prompts, responses = lengths()
    ids = make_sample_ids(
        torch.arange(NUM_PROMPTS).repeat_interleave(SIBLINGS), torch.arange(SIBLINGS).repeat(NUM_PROMPTS)
    )
    mine = torch.from_numpy(holders_of(kind) == transport.rank).nonzero().squeeze(1)
    held = None
    if len(mine):
        count, total = responses[mine], int(responses[mine].sum())
        groups = torch.unique(mine // SIBLINGS)
        tokens = Jagged(torch.zeros(int(prompts[groups].sum()), dtype=torch.int64), prompts[groups], "prompt_tokens")
        held = Batch(
            ids[mine],
            {
                "tokens": Jagged(torch.zeros(total, dtype=torch.int64), count, "tokens"),
                "response_mask": Jagged(torch.ones(total, dtype=torch.bool), count, "tokens"),
                "old_log_probs": Jagged(torch.zeros(total), count, "response_tokens"),
                "rewards": torch.zeros(len(mine)),
            },
            Batch(groups, {"prompt_tokens": tokens}),
            torch.searchsorted(groups, mine // SIBLINGS),
        )
    arrived = reshard(action_of(kind, keep_groups=keep_groups), transport.world, held, None)
    traffic = transport.traffic()
    return [] if arrived is None else sorted(arrived.ids.tolist()), traffic.sent, traffic.received


@pytest.mark.parametrize("kind", ["pools", "skewed"])
@pytest.mark.parametrize("keep_groups", [False, True])
def test_a_simulated_exchange_is_the_real_one(ranks: RankPool, kind: Kind, keep_groups: bool) -> None:
    real = ranks.run(WORLD_SIZE, exchange, kind, keep_groups)
    prompts, responses = (part.numpy() for part in lengths())
    groups = np.repeat(np.arange(NUM_PROMPTS), SIBLINGS)
    rows = Rows(groups, prompts[groups], responses, are_samples=True)
    action, holders = action_of(kind, keep_groups=keep_groups), holders_of(kind)
    owners = owners_of(action, rows, holders)
    ids = make_sample_ids(torch.from_numpy(groups), torch.arange(SIBLINGS).repeat(NUM_PROMPTS)).numpy()
    routes = Routes(rows, holders, owners, action.target_layout, is_agreed=False)
    moved = transfer_of(routes, COLUMNS)
    for rank, (arrived, sent, received) in enumerate(real):
        if rank in action.target_layout:
            assert arrived == sorted(ids[owners == action.target_layout.shard_of(rank)].tolist())
        # Numbers of rows, and columns that begin at multiples of eight bytes, come on top of each message.
        for actual, simulated in ((sent, moved.sent(WORLD_SIZE)[rank]), (received, moved.received(WORLD_SIZE)[rank])):
            assert simulated <= actual <= simulated + 100 * (WORLD_SIZE - 1)
    assert moved.sizes.sum() > 20_000
