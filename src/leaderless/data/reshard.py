"""One change of layout: who has which rows, who gets them, and the bytes between the two.

The ranks concerned tell each other the id, group and cost of every row (24 bytes a row), compute the same assignment,
and send the rows straight to their new owners. Ranks that hold the same rows share the sending. A prompt travels once
to each owner of some of its samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.data.balance import assign, sequence_cost
from leaderless.data.batch import Batch, Jagged
from leaderless.data.transport import Group
from leaderless.data.wire import Schema, pack, schema_from_json, schema_of, schema_to_json, unpack
from leaderless.planner import Layout, Reshard

Int = NDArray[np.int64]

GROUP_COLUMN = "<group id>"
"""Rows travel with the id of their prompt in a column of this name, which no stage would take."""


def reshard(action: Reshard, group: Group, held: Batch | None, wanted: Tensor | None) -> Batch | None:
    """Bring rows from one layout to another. All ranks of both layouts call it together.

    Args:
        action: What travels, and between which layouts.
        group: The ranks of both layouts.
        held: The rows that this rank has under the source layout.
        wanted: Ids of the rows that this rank speaks for under the target layout, when an earlier change of layout has
            decided that already.

    Returns:
        This rank's rows under the target layout, or None when it is not part of that.

    Raises:
        RuntimeError: Ranks disagree on a column's type or on the rows of a shard, a row is held by two shards, or a
            wanted row is held by none.
    """
    schemas = _agree_on_schemas(action, group, held)
    if held is not None:
        held = _spoken_for(held, action.source_layout, group.rank)
    routes = _agree_on_routes(action, group, held, wanted)
    parcels = _make_parcels(group.rank, routes, held)
    mine = parcels.pop(group.rank, None)
    senders = routes.senders_to(group.rank)
    messages = {receiver: parcel.message for receiver, parcel in parcels.items()}
    arrived = group.exchange(messages, senders, f"edge {action.name}")
    if group.rank not in action.target_layout:
        return None
    received = [_Parcel.unpack(message, schemas) for _, message in sorted(arrived.items())]
    return _join([mine, *received] if mine else received, schemas)


@dataclass(frozen=True)
class _Schemas:
    """Types of the columns that travel; no schema for prompts means that rows are prompts."""

    rows: Schema
    prompts: Schema | None

    @classmethod
    def of(cls, held: Batch) -> _Schemas:
        return cls(schema_of(_with_group(held)), None if held.prompts is None else schema_of(held.prompts))

    def to_json(self) -> str:
        return json.dumps([schema_to_json(self.rows), None if self.prompts is None else schema_to_json(self.prompts)])

    @classmethod
    def from_json(cls, text: str) -> _Schemas:
        rows, prompts = json.loads(text)
        return cls(schema_from_json(rows), None if prompts is None else schema_from_json(prompts))


@dataclass(frozen=True)
class _Parcel:
    """What one rank sends another: rows, and the prompts that this sender answers for."""

    rows: Batch
    prompts: Batch | None

    @cached_property
    def message(self) -> Tensor:
        """The parcel as bytes, packed once for all ranks of a shard."""
        parts = [pack(self.rows), pack(self.prompts)] if self.prompts is not None else [pack(self.rows)]
        return torch.cat(parts)

    @classmethod
    def unpack(cls, message: Tensor, schemas: _Schemas) -> _Parcel:
        rows, size = unpack(message, schemas.rows)
        return cls(rows, None if schemas.prompts is None else unpack(message[size:], schemas.prompts)[0])


@dataclass(frozen=True)
class _Routes:
    """For every row of the edge: its id, its group, the rank that holds it and the shard that gets it."""

    ids: Int
    group_ids: Int
    holders: Int
    owners: Int
    target: Layout

    def ranks_of_shard(self, shard: int) -> tuple[int, ...]:
        size = self.target.ranks_per_shard
        return self.target.ranks[shard * size : (shard + 1) * size]

    def senders_to(self, rank: int) -> list[int]:
        """Other ranks that hold rows for a rank."""
        if rank not in self.target:
            return []
        holders = np.unique(self.holders[self.owners == self.target.shard_of(rank)])
        return [int(holder) for holder in holders if holder != rank]

    def prompts_sent(self, rank: int, shard: int) -> Int:
        """Groups whose prompt a rank sends to a shard: those of which no lower rank sends a sample there."""
        to_shard = self.owners == shard
        groups, inverse = np.unique(self.group_ids[to_shard], return_inverse=True)
        lowest = np.full(len(groups), np.iinfo(np.int64).max)
        np.minimum.at(lowest, inverse, self.holders[to_shard])
        chosen: Int = groups[lowest == rank]
        return chosen


def _agree_on_schemas(action: Reshard, group: Group, held: Batch | None) -> _Schemas:
    """The schema that all who have rows have; the lowest of them tells the others.

    A rank without rows may not know the types of its columns, so it is asked only when no rank has rows.
    """
    text, facts = "", (0, 0, 0)
    if held is not None:
        text = _Schemas.of(held).to_json()
        facts = (_digest(text.encode()), len(held), _digest(held.ids.numpy().tobytes()))
    what = f"the columns of edge {action.name}"
    digests, num_rows, rows = torch.cat(group.gather(torch.tensor([facts]), what)).unbind(1)
    _check_replicas(action, dict(zip(group.ranks, rows.tolist(), strict=True)))
    holders = (num_rows if num_rows.any() else digests).nonzero().squeeze(1)
    first = int(holders[0])
    schemas = _Schemas.from_json(group.broadcast_text(text, group.ranks[first], what))
    for other in holders.tolist():
        if digests[other] != digests[first]:
            raise RuntimeError(
                f"edge {action.name}: rank {group.ranks[other]} holds columns of another type than rank "
                f"{group.ranks[first]}{_difference(_Schemas.from_json(text), schemas) if text else ''}"
            )
    return schemas


def _digest(content: bytes) -> int:
    """Positive, and fits int64."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "little") + 1


def _check_replicas(action: Reshard, rows: Mapping[int, int]) -> None:
    """The ranks of one shard have the same rows, told by their digests; what each sends would not fit together else."""
    source = action.source_layout
    for rank in source.ranks:
        first = source.ranks[source.shard_of(rank) * source.ranks_per_shard]
        if rows[rank] != rows[first]:
            raise RuntimeError(
                f"edge {action.name}: ranks {first} and {rank} hold one shard, but not the same rows: node "
                f"'{action.source}' must do the same on both"
            )


def _spoken_for(held: Batch, layout: Layout, rank: int) -> Batch:
    """The part of a rank's rows that it answers for, as one of several that hold the same rows."""
    size = layout.ranks_per_shard
    if size == 1:
        return held
    place = layout.ranks.index(rank) % size
    return held.select(torch.arange(len(held) * place // size, len(held) * (place + 1) // size))


def _difference(mine: _Schemas, agreed: _Schemas) -> str:
    """How this rank's columns differ from the others'; empty if they do not."""
    here, there = ({*schemas.rows, *(schemas.prompts or ())} for schemas in (mine, agreed))
    if here == there:
        return ""
    parts = (", ".join(sorted(map(str, columns))) or "nothing" for columns in (here - there, there - here))
    return ": {} instead of {}".format(*parts)


def _agree_on_routes(action: Reshard, group: Group, held: Batch | None, wanted: Tensor | None) -> _Routes:
    """Every rank computes the same owners from the same facts."""
    facts = torch.empty((0, 3), dtype=torch.int64) if held is None else _facts(held)
    gathered = group.gather(facts, f"the rows of edge {action.name}")
    rows = torch.cat(gathered).numpy()
    holders = np.repeat(np.array(group.ranks), [len(part) for part in gathered])
    ids, group_ids, costs = rows[:, 0], rows[:, 1], rows[:, 2]
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) != len(ids):
        raise RuntimeError(f"edge {action.name}: row {unique[counts > 1][0]} is held by two shards")
    claims = group.gather(torch.empty(0, dtype=torch.int64) if wanted is None else wanted, f"edge {action.name}")
    if any(len(claim) for claim in claims):
        owners = _claimed(action, group, ids, claims)
    else:
        target = action.target_layout
        shard_of_rank = {rank: target.shard_of(rank) if rank in target else -1 for rank in group.ranks}
        held_by = np.array([shard_of_rank[rank] for rank in group.ranks])
        units = group_ids if action.keep_groups else ids
        owners = assign(costs, units, np.repeat(held_by, [len(part) for part in gathered]), target.dp)
    return _Routes(ids, group_ids, holders, owners, action.target_layout)


def _claimed(action: Reshard, group: Group, ids: Int, claims: Sequence[Tensor]) -> Int:
    """Owners that an earlier change of layout decided on."""
    target = action.target_layout
    claimed = torch.cat(list(claims)).numpy()
    shards = np.array([target.shard_of(rank) if rank in target else -1 for rank in group.ranks])
    shard_of_claim = np.repeat(shards, [len(claim) for claim in claims])
    order = np.argsort(claimed)
    place = np.searchsorted(claimed[order], ids)
    if len(claimed) != len(ids) or not np.array_equal(claimed[order], np.sort(ids)):
        raise RuntimeError(
            f"edge {action.name}: {len(ids)} rows are held, but {len(claimed)} are wanted, or they are not the same"
        )
    owners: Int = shard_of_claim[order][place]
    return owners


def _make_parcels(rank: int, routes: _Routes, held: Batch | None) -> dict[int, _Parcel]:
    """What this rank sends, by receiver; itself may be one."""
    parcels: dict[int, _Parcel] = {}
    if held is None:
        return parcels
    rows = _with_group(held)
    position = {row: index for index, row in enumerate(held.ids.tolist())}
    mine = routes.holders == rank
    for shard in np.unique(routes.owners[mine]).tolist():
        index = torch.tensor([position[row] for row in routes.ids[mine & (routes.owners == shard)].tolist()])
        prompts = None
        if held.prompts is not None:
            chosen = torch.from_numpy(routes.prompts_sent(rank, shard))
            prompts = held.prompts.select(torch.isin(held.prompts.ids, chosen))
        parcel = _Parcel(rows.select(index), prompts)
        parcels |= dict.fromkeys(routes.ranks_of_shard(shard), parcel)
    return parcels


def _join(parcels: Sequence[_Parcel], schemas: _Schemas) -> Batch:
    """The rows of several parcels, pointing to the prompts of all of them."""
    parcels = parcels or [_empty_parcel(schemas)]
    rows = Batch.concat([parcel.rows for parcel in parcels])
    group_ids = rows.dense(GROUP_COLUMN)
    columns = {name: column for name, column in rows.columns.items() if name != GROUP_COLUMN}
    if schemas.prompts is None:
        return Batch(rows.ids, columns)
    prompts = Batch.concat([parcel.prompts for parcel in parcels if parcel.prompts is not None])
    prompts = prompts.select(torch.argsort(prompts.ids))
    return Batch(rows.ids, columns, prompts, torch.searchsorted(prompts.ids, group_ids))


def _empty_parcel(schemas: _Schemas) -> _Parcel:
    """A parcel without rows, for a shard that gets none: its columns have the right types all the same."""
    nothing = torch.zeros(8, dtype=torch.uint8)
    rows, _ = unpack(nothing, schemas.rows)
    return _Parcel(rows, None if schemas.prompts is None else unpack(nothing, schemas.prompts)[0])


def _with_group(batch: Batch) -> Batch:
    """The rows' own columns and the id of their prompt."""
    return Batch(batch.ids, {**batch.columns, GROUP_COLUMN: batch.group_ids})


def _facts(batch: Batch) -> Tensor:
    """[n, 3]: id, group and cost of each row."""
    tokens = _lengths(batch, "prompt_tokens") + _lengths(batch, "tokens")
    cost = torch.from_numpy(sequence_cost(tokens.clamp(min=1).numpy()))
    return torch.stack([batch.ids, batch.group_ids, cost], dim=1)


def _lengths(batch: Batch, name: str) -> Tensor:
    """[n] int64: length of each row's run in a column, which may be its prompt's; 0 where there is no such column."""
    column = batch.columns.get(name)
    if isinstance(column, Jagged):
        return column.lengths
    if batch.prompts is not None and batch.prompt_index is not None:
        return _lengths(batch.prompts, name)[batch.prompt_index]
    return torch.zeros(len(batch), dtype=torch.int64)
