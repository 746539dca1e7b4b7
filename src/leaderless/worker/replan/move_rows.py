"""Moves rows that stay between steps, such as surplus groups, from the ranks of one layout to the ranks of another."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.data.batch import Batch, with_rows
from leaderless.data.buffer.databuffer import sort_rows
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout
from leaderless.worker.checkpoint.channel_rows import rows_from_bytes, rows_to_bytes, share_of


def move_rows(source: Layout, target: Layout, held: Batch | None, world: ProcessGroup, what: str) -> Batch | None:
    """Send rows to the ranks that would read them from a checkpoint. All ranks of the world call it together.

    Args:
        source: Layout that has the rows.
        target: Layout that is to have them.
        held: Rows of this rank's shard, if it has some.
        world: All ranks.
        what: Name of the rows in errors.

    Returns:
        The rows of this rank's new shard; None if it has none, or nobody has had rows.
    """
    mine = held if world.rank in source and source.represents(world.rank) else None
    own = torch.zeros(0, dtype=torch.int64) if mine is None else torch.unique(mine.group_ids)
    gathered = world.gather(own, what)
    has_any = int(world.sum(torch.tensor([int(mine is not None)]), what)) > 0
    if not has_any:
        return None
    known = [gathered[world.ranks.index(rank)] for rank in source.representatives]
    shares = _shares(known, target.dp)
    messages: dict[int, Tensor] = {}
    kept: dict[int, Batch] = {}
    for shard, (senders, groups) in enumerate(shares):
        place = source.shard_of(world.rank) if mine is not None else -1
        if mine is None or place not in senders:
            continue
        part = mine if source.dp == target.dp else mine.select(torch.isin(mine.group_ids, groups))
        message = rows_to_bytes(part)
        for rank in _ranks_of(target, shard):
            if rank == world.rank:
                kept[place] = part
            else:
                messages[rank] = message
    senders = shares[target.shard_of(world.rank)][0] if world.rank in target else []
    here = {source.representatives[sender]: sender for sender in senders}
    received = world.exchange(messages, sorted(rank for rank in here if rank != world.rank), what)
    if world.rank not in target:
        return None
    arrived = kept | {here[rank]: rows_from_bytes(message) for rank, message in received.items()}
    parts = [arrived[place] for place in sorted(arrived)]
    return parts[0] if source.dp == target.dp else sort_rows(Batch.concat(with_rows(parts)), what)


def _shares(known: list[Tensor], num_shards: int) -> list[tuple[list[int], Tensor]]:
    """For each new shard the old ones that send it rows, at least one, and the groups that it gets.

    With as many shards as before each keeps its rows, so that sums come out the same to the last bit.
    """
    if len(known) == num_shards:
        return [([shard], groups) for shard, groups in enumerate(known)]
    groups = torch.unique(torch.cat(known))
    shares = []
    for shard in range(num_shards):
        mine = share_of(groups, shard, num_shards)
        senders = {place for place, held in enumerate(known) if bool(torch.isin(held, mine).any())}
        # Without any group a shard still has to know the columns.
        shares.append((sorted(senders or {shard * len(known) // num_shards}), mine))
    return shares


def _ranks_of(layout: Layout, shard: int) -> tuple[int, ...]:
    """The ranks that hold the rows of a shard."""
    return layout.ranks[shard * layout.ranks_per_shard : (shard + 1) * layout.ranks_per_shard]
