"""Compares rows before ranks send them: each shard has one set of rows, and columns have one type on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from leaderless.data.buffer.block_exchange import ExchangeLeg, MeshPosition, Talk, hold
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout
from leaderless.planner.assign.balance import Int
from leaderless.planner.assign.blocks import Mesh, is_in_blocks

NOBODY = np.iinfo(np.int64).max
TYPES, NUM_ROWS, ROWS = range(3)
"""Facts of a rank: a digest of its columns' types, the number of its rows, and a digest of their ids."""


@dataclass(frozen=True)
class Unlike:
    """The difference, or None: the lowest rank whose rows differ from its peers', and two ranks whose types differ."""

    rows: int | None
    types: tuple[int, int] | None


def find_unlike(process_group: ProcessGroup, layout: Layout, facts: Int, what: str) -> Unlike:
    """Compare facts, [3], of all ranks of a layout, which call it together: the same result on each."""
    if is_in_blocks(process_group.size):
        return hold(process_group, unlike_in_blocks(layout, process_group.rank, facts), what)
    return unlike_of(layout, torch.cat(process_group.gather(torch.from_numpy(facts[None]), what)).numpy())


def unlike_of(layout: Layout, facts: Int) -> Unlike:
    """The result on a rank that has the facts of all, [ranks, 3]."""
    ranks, places = np.array(layout.ranks), np.arange(len(layout.ranks))
    others = ranks[facts[:, ROWS] != facts[places - places % layout.ranks_per_shard, ROWS]]
    # A rank without rows may not know the types of its columns.
    knowing = facts[:, NUM_ROWS] > 0
    return _answer(int(others.min(initial=NOBODY)), _two_types(ranks[knowing], facts[knowing, TYPES]))


def unlike_in_blocks(layout: Layout, rank: int, facts: Int) -> Talk[Unlike]:
    """The result where a rank knows the facts of its peers and of its block, and summaries of other blocks."""
    place = MeshPosition(Mesh(len(layout.ranks)), layout.place(rank))
    other = NOBODY
    if layout.ranks_per_shard > 1:
        begin = place.number - layout.place_in_shard(rank)
        peers = [peer for peer in range(begin, begin + layout.ranks_per_shard) if peer != place.number]
        heard = yield ExchangeLeg(dict.fromkeys(peers, facts[[ROWS]]), peers)
        if place.number != begin and int(heard[begin][0]) != int(facts[ROWS]):
            other = rank
    mine = [other, rank if facts[NUM_ROWS] else NOBODY, int(facts[TYPES]), NOBODY]
    block = np.concatenate((yield from place.to_block(np.array([mine]))))
    found = _joined((yield from place.across(_joined(block))))
    return _answer(int(found[0]), found[1:])


def _joined(rows: Int) -> Int:
    """[4] of some ranks, from results of parts of them: the lowest with other rows, and as `_two_types` puts out."""
    firsts, types, seconds = rows[:, 1], rows[:, 2], rows[:, 3]
    joined = _two_types(firsts[firsts < NOBODY], types[firsts < NOBODY])
    # A part whose first rank has the first types of all may have another rank that differs.
    is_like = (types == joined[1]) & (firsts < NOBODY)
    joined[2] = min(int(joined[2]), int(seconds[is_like].min(initial=NOBODY)))
    return np.array([rows[:, 0].min(), *joined])


def _two_types(ranks: Int, types: Int) -> Int:
    """[3] the lowest of some ranks, its types, and the lowest rank with other types."""
    if not len(ranks):
        return np.array([NOBODY, 0, NOBODY])
    first = int(ranks.argmin())
    return np.array([ranks[first], types[first], ranks[types != types[first]].min(initial=NOBODY)])


def _answer(rows: int, types: Int) -> Unlike:
    first, _, second = types.tolist()
    return Unlike(None if rows == NOBODY else rows, None if second == NOBODY else (first, second))
