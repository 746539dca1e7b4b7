"""Ranks that agree on rows in blocks, as very many do, and then really exchange them."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_databuffer import IN_WINDOWS, SPLIT_GROUPS
from tests.distributed.test_simulated_bytes import (
    KINDS,
    WORLD_SIZE,
    rows_of,
    sample_ids,
    shards_of,
    spare_shards,
)
from tests.distributed.walks import Case, walk

from leaderless.data.batch import Batch
from leaderless.data.buffer import reshard as ways
from leaderless.data.buffer import row_agreement
from leaderless.data.buffer.row_agreement import Span, Surplus
from leaderless.distributed.transport import Transport
from leaderless.planner import Reshard


def walk_in_blocks(case: Case) -> list[dict[str, list[int]]]:
    with patch.object(ways, "is_in_blocks", lambda _: True):
        return walk(case)


@pytest.mark.parametrize("case", [SPLIT_GROUPS, IN_WINDOWS])
def test_every_row_and_byte_arrives_where_ranks_agree_in_blocks(ranks: RankPool, case: Case) -> None:
    # The walk itself compares what has arrived, and lets nothing be missing.
    first, second = zip(*ranks.run(case.world_size, walk_in_blocks, case, timeout_s=60, deadline_s=120), strict=True)
    assert first == second


def exchange_in_blocks(action: Reshard) -> list[int]:
    """The rows that this rank receives."""
    rank = torch.distributed.get_rank()
    transport = Transport(torch.device("cpu"), timeout_s=20, host=f"host {rank // 2}")
    held = rows_of(action.source_layout, shards_of(action.source_layout), rank)
    spare = rows_of(action.spare_layout, spare_shards(), rank) if rank in action.target_layout else None
    with patch.object(ways, "is_in_blocks", lambda _: True):
        arrived = ways.reshard(action, transport.world, held, None, spare)
    return [] if arrived is None else arrived.ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_once_for_every_kind_of_layout(ranks: RankPool, kind: str) -> None:
    action = KINDS[kind]
    found, target = ranks.run(WORLD_SIZE, exchange_in_blocks, action), action.target_layout
    by_shard = {target.shard_of(rank): found[rank] for rank in target.ranks}
    assert all(found[rank] == by_shard[target.shard_of(rank)] == sorted(found[rank]) for rank in target.ranks)
    assert sorted(row for rows in by_shard.values() for row in rows) == sorted(sample_ids().tolist())


def take_groups(_: object) -> tuple[list[int], list[int], Span]:
    """What this rank gets of surplus groups, and what it keeps, if ranks select in blocks."""
    rank = torch.distributed.get_rank()
    transport = Transport(torch.device("cpu"), timeout_s=20)
    rows = Batch(torch.arange(4) * 4 + rank, {"rewards": torch.zeros(4)})  # groups rank, 4 + rank, 8 + rank, 12 + rank
    surplus = Surplus(rows)
    with patch.object(row_agreement, "is_in_blocks", lambda *_: True):
        taken = surplus.take(6, transport.world)
    assert surplus.batch is not None
    return taken.group_ids.tolist(), surplus.batch.group_ids.tolist(), surplus.carried


def test_the_first_groups_of_all_ranks_are_taken_in_blocks(ranks: RankPool) -> None:
    taken, left, carried = zip(*ranks.run(4, take_groups, None), strict=True)
    assert taken == ([0, 4], [1, 5], [2], [3])
    assert left == ([8, 12], [9, 13], [6, 10, 14], [7, 11, 15])
    assert set(carried) == {Span(10, 6, 15)}
