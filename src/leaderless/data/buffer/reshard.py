"""One reshard: all its ranks agree on the holders and new owners of rows, then send the bytes to the owners.

    facts      id, group and cost of each row
      |        few ranks: all know all rows, and compute the same; many ranks: they agree in blocks
    routes     holder and new owner of each row
      |        the lowest rank with rows sends them to the others
    schemas    names and types of the columns
      |        lengths of ragged rows first, so that both sides know every size
    bytes      straight from holders to owners

No ids and no headers go with the bytes: both sides compute from the routes what a message holds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer.block_exchange import hold
from leaderless.data.buffer.block_routes import HELD, NOTHING, SPARE, WANTED, Meeting, agree
from leaderless.data.buffer.transfer import ReshardTransfer
from leaderless.data.buffer.wire import Schema, schema_from_json, schema_of, schema_to_json
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout, Reshard
from leaderless.planner.assign.balance import (
    EarlierWork,
    Int,
    assign,
    at_places,
    by_part,
    first_places,
    is_repeated,
    parts_of,
    sequence_cost,
)
from leaderless.planner.assign.blocks import is_in_blocks
from leaderless.planner.assign.routes import RowRoutes

_NO_IDS = torch.empty(0, dtype=torch.int64)


def reshard(
    action: Reshard,
    process_group: ProcessGroup,
    held: Batch | None,
    wanted: Batch | None,
    spare: Batch | None = None,
    earlier: EarlierWork | None = None,
    agreeing: AbstractContextManager[object] | None = None,
) -> Batch | None:
    """Reshard rows. All ranks of both layouts call it together.

    They agree on the assignment: few ranks gather the id, group and cost of every row, 24 bytes a row; many agree in
    blocks, so that no rank has to know every row. The lengths of ragged rows are sent first, then all bytes in pieces,
    straight from the columns of a row's holder to its owner's columns. Ranks that hold the same rows share the sending,
    a prompt is sent once to each owner of some of its samples, and peers on one host get one copy from another host.

    Args:
        action: Columns to send, and both layouts.
        process_group: The ranks of both layouts.
        held: The rows that this rank has under the source layout, in ascending order of their ids.
        wanted: The rows that this rank represents under the target layout, without columns, when an earlier reshard has
            decided that already.
        spare: Rows with the same columns that this rank has from an earlier reshard, ascending; they are not sent to
            it again. Only where `action.spare_layout` names that layout.
        earlier: Work of the target's shards in earlier windows of the step, to which this reshard adds. The same on all
            ranks that agree on the work of a shard.
        agreeing: Context that is entered until all ranks have come, and know which rows go where.

    Returns:
        This rank's rows under the target layout, ascending, or None when it is not part of that.

    Raises:
        RuntimeError: A row is held by two shards, or a wanted row is held by none.
    """
    # The time until the slowest rank has come is a wait for others, and counts as one.
    with agreeing or nullcontext():
        routes = agree_on_routes(action, process_group, held, wanted, spare, earlier)
    schemas = _agree_on_schemas(action, process_group, routes, held)
    return ReshardTransfer(process_group, routes, schemas, held, spare, f"edge {action.name}").run()


def _agree_on_schemas(
    action: Reshard, process_group: ProcessGroup, routes: RowRoutes, held: Batch | None
) -> tuple[Schema, ...]:
    """Types of the rows' columns, and of their prompts' if rows are samples, as the lowest rank with rows has them.

    A rank without rows may not know the types of its columns.
    """
    first = routes.first_holder
    text = schemas_to_json(held) if held is not None and process_group.rank == first else ""
    known: list[str] = json.loads(process_group.broadcast_text(text, first, f"the columns of edge {action.name}"))
    return tuple(map(schema_from_json, known))


def schemas_to_json(batch: Batch) -> str:
    """Types of a batch's columns, and of its prompts' columns if it has prompts, as text."""
    tables = [batch] if batch.prompts is None else [batch, batch.prompts]
    return json.dumps([schema_to_json(schema_of(table)) for table in tables])


def agree_on_routes(
    action: Reshard,
    process_group: ProcessGroup,
    held: Batch | None,
    wanted: Batch | None,
    spare: Batch | None = None,
    earlier: EarlierWork | None = None,
) -> RowRoutes:
    """Where rows go; arguments as of `reshard`. All ranks take part, the way that their number makes cheaper."""
    way = agree_in_blocks if is_in_blocks(process_group.size) else agree_at_once
    return way(action, process_group, held, wanted, spare, earlier)


def agree_at_once(
    action: Reshard,
    process_group: ProcessGroup,
    held: Batch | None,
    wanted: Batch | None,
    spare: Batch | None,
    earlier: EarlierWork | None,
) -> RowRoutes:
    """Where every row goes. All ranks compute the same from the same facts."""
    source, target = action.source_layout, action.target_layout
    facts = torch.empty((0, 3), dtype=torch.int64)
    if held is not None:
        # Ranks with the same rows report a part each, so that no row is counted twice.
        facts = _facts(action, held)[_represented(len(held), source, process_group.rank)]
    what = _rows_of(action)
    gathered = process_group.gather(facts, what)
    rows = torch.cat(gathered).numpy()
    counts = [len(part) for part in gathered]
    ids, group_ids = rows[:, 0], rows[:, 1]
    in_order = np.sort(ids)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(twice):
        raise RuntimeError(f"edge {action.name}: row {twice[0]} is held by two shards")
    spares: dict[int, Int] = {}
    # The plan decides, not what this rank has: a gather that only some ranks begin would never end.
    if action.spare_layout is not None:
        known = process_group.gather(_NO_IDS if spare is None else spare.ids, what)
        spares = {rank: part.numpy() for rank, part in zip(process_group.ranks, known, strict=True) if len(part)}
    claims = process_group.gather(_NO_IDS if wanted is None else wanted.ids, what) if action.is_late else []
    shards = np.array([target.shard_of(rank) if rank in target else -1 for rank in process_group.ranks])
    if any(len(claim) for claim in claims):
        owners = _claimed(action, shards, ids, claims)
    else:
        holding = np.repeat(shards, counts)
        # A row whose holder has no shard of the target is cheapest where an earlier reshard has put it.
        for rank, known_ids in spares.items():
            if rank in target:
                holding[(holding < 0) & np.isin(ids, known_ids)] = target.shard_of(rank)
        owners = _assigned(action, rows, holding, earlier)
    holders = np.repeat(np.array(process_group.ranks), counts)
    # A rank whose host is unknown is given one of its own.
    hosts = {rank: process_group.hosts.get(rank, -1 - rank) for rank in process_group.ranks}
    first = int(holders.min()) if len(holders) else source.ranks[0]
    return RowRoutes(ids, group_ids, holders, owners, source, target, hosts, spares, first)


def _assigned(action: Reshard, rows: Int, holding: Int, earlier: EarlierWork | None) -> Int:
    """[n] shard of each row, [n, 3] id, group and cost; each update's rows are divided for themselves."""
    ids, group_ids, costs = rows.T
    units, num_shards = group_ids if action.keep_groups else ids, action.target_layout.dp
    if earlier is not None:
        parts = earlier.parts_of(group_ids)

        def assign_more(some: NDArray[np.bool_]) -> Int:
            # A view: what is added to it counts in the next window.
            loads = earlier.loads[parts[some][0]]
            owners = assign(costs[some], units[some], holding[some], num_shards, loads)
            np.add.at(loads, owners, costs[some])
            return owners

        return by_part(parts, assign_more)
    if action.num_updates == 1:
        return assign(costs, units, holding, num_shards)
    # Each update is divided by itself: even work over the step alone would let ranks wait at each update.
    groups = np.unique(group_ids)
    parts = parts_of(group_ids, at_places(groups, first_places(len(groups), action.num_updates)))
    return by_part(parts, lambda some: assign(costs[some], units[some], holding[some], num_shards))


def agree_in_blocks(
    action: Reshard,
    process_group: ProcessGroup,
    held: Batch | None,
    wanted: Batch | None,
    spare: Batch | None,
    earlier: EarlierWork | None,
) -> RowRoutes:
    """Where the rows go of groups of which this rank has or gets rows; it does not know most other groups."""
    meeting = Meeting(action, process_group.ranks, process_group.hosts)
    facts = facts_of(action, process_group.rank, held, wanted, spare)
    return hold(process_group, agree(meeting, process_group.rank, facts, earlier), _rows_of(action))


def facts_of(action: Reshard, rank: int, held: Batch | None, wanted: Batch | None, spare: Batch | None) -> Int:
    """[n, 6] facts about rows that a rank has, wants, or received before."""
    source, target = action.source_layout, action.target_layout
    own = rank, target.shard_of(rank) if rank in target else -1
    parts = [NOTHING]
    if held is not None:
        facts = _facts(action, held)[_represented(len(held), source, rank)].numpy()
        parts.append(_said(HELD, facts[:, 0], facts[:, 1], *own, facts[:, 2]))
    if spare is not None and rank in target:
        parts.append(_said(SPARE, spare.ids.numpy(), spare.group_ids.numpy(), *own))
    if wanted is not None and action.is_late:
        parts.append(_said(WANTED, wanted.ids.numpy(), wanted.group_ids.numpy(), *own))
    return np.concatenate(parts)


def _said(kind: int, ids: Int, group_ids: Int, rank: int, shard: int, costs: Int | int = 0) -> Int:
    columns = (kind, ids, group_ids, rank, shard, costs)
    return np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int64)


def _rows_of(action: Reshard) -> str:
    return f"the rows of edge {action.name}"


def _represented(num_rows: int, layout: Layout, rank: int) -> slice:
    """The part of a rank's rows that it represents, as one of several that hold the same rows."""
    place, size = layout.place_in_shard(rank), layout.ranks_per_shard
    return slice(num_rows * place // size, num_rows * (place + 1) // size)


def _claimed(action: Reshard, shards: Int, ids: Int, claims: Sequence[Tensor]) -> Int:
    """Owners that an earlier reshard has decided on."""
    claimed = torch.cat(list(claims)).numpy()
    shard_of_claim = np.repeat(shards, [len(claim) for claim in claims])
    order = np.argsort(claimed)
    place = np.searchsorted(claimed[order], ids)
    if len(claimed) != len(ids) or not np.array_equal(claimed[order], np.sort(ids)):
        raise RuntimeError(
            f"edge {action.name}: {len(ids)} rows are held, but {len(claimed)} are wanted, or they are not the same"
        )
    owners: Int = shard_of_claim[order][place]
    return owners


def _facts(action: Reshard, batch: Batch) -> Tensor:
    """[n, 3]: id, group and cost of each row. A prompt that rows point to is computed with the first of them.

    Ranks use the costs that they are sent, so that they agree even if not all of them know the model's size.
    """
    prompts = _lengths(batch, "prompt_tokens")
    shared = torch.zeros_like(prompts)
    if batch.prompt_index is not None and "prompt_tokens" not in batch.columns:
        shared = prompts * torch.from_numpy(is_repeated(batch.prompt_index.numpy()))
    tokens = prompts + _lengths(batch, "tokens")
    # At least 1, or rows without tokens would never fill a shard, and all of them would go to the same one.
    cost = torch.from_numpy(sequence_cost(tokens.numpy(), action.quadratic_tokens, shared.numpy())).clamp(min=1)
    return torch.stack([batch.ids, batch.group_ids, cost], dim=1)


def _lengths(batch: Batch, name: str) -> Tensor:
    """[n] int64: length of each row's run in a column, which may be its prompt's; 0 where there is no such column."""
    column = batch.columns.get(name)
    if isinstance(column, Jagged):
        return column.lengths
    if batch.prompts is not None and batch.prompt_index is not None:
        return _lengths(batch.prompts, name)[batch.prompt_index]
    return torch.zeros(len(batch), dtype=torch.int64)
