"""The databuffer gives every node the columns that it reads.

Nodes on one layout share a table of rows; between layouts the ranks concerned exchange bytes, as `reshard` does.

    one layout       rollout -- put --> [ table of rows ] -- get --> reward      the same tensors
                                               |
                                               | reshard: bytes of rows, from rank to rank
                                               v
    another layout                      [ table of rows ] -- get --> update
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from leaderless.data.batch import Batch, Column, Jagged, concat_columns, select_rows
from leaderless.data.buffer.reshard import reshard, schemas_to_json
from leaderless.data.buffer.row_agreement import Surplus, find_unlike
from leaderless.data.buffer.wire import schema_from_json, what_changes
from leaderless.distributed.background import Background
from leaderless.distributed.transport import ProcessGroup, Transport, digest
from leaderless.planner import (
    Action,
    Channel,
    Layout,
    Load,
    Plan,
    PlannedNode,
    Push,
    Repeat,
    Reshard,
    RunNode,
    Windowed,
    flat,
)
from leaderless.planner.assign.balance import EarlierWork

WINDOWS = "windows"
"""Lane in which windows are sent."""
WINDOWS_UNDER_WAY = 2
"""Windows of an edge that are being sent, or wait to be, while the next one is made."""

TableKey = tuple[str, tuple[int, ...], int]
"""Row set, ranks and data-parallel size."""


class Databuffer:
    """One rank's rows of a step.

    Attributes:
        surplus: Groups that repeated nodes have chosen for a later step, where the last of them runs.
    """

    def __init__(self, plan: Plan, transport: Transport) -> None:
        """Take the chain of this rank; the transport has the process groups of all its reshards."""
        self.plan = plan
        self.transport = transport
        self.rank = transport.rank
        self.surplus = Surplus()
        self._tables: dict[TableKey, RowTable] = {}
        self._windows: list[dict[TableKey, RowTable]] = []
        # All ranks give it the same exchanges in the same order, so that no two wait for each other crosswise.
        self._background = Background("databuffer")
        self._arrivals: dict[tuple[TableKey, int], list[Future[None]]] = {}
        self._under_way: dict[Reshard, deque[Future[None]]] = {}
        self._earlier: dict[Reshard, EarlierWork] = {}
        self._readers = _readers(plan)
        self._sent = {action.source for action in flat(plan.schedule) if isinstance(action, Reshard)}
        self._is_continuous = plan.loop_of(self.rank).is_continuous
        self._sent |= {reshard.source for channel in plan.channels for reshard in channel.reshards}
        self._released_after = _last_readers(plan, self.rank)

    def load(self, action: Load, batch: Batch) -> None:
        """Insert the prompts of this rank's dataloader, with all columns that the entry of the chain names."""
        self._tables[_key("data", action.layout)] = RowTable.of(batch.only(action.columns), "data")

    def get(self, name: str, window: int | None = None) -> Batch:
        """The rows of this rank, of one window or all, with the columns that a node reads."""
        node = self.plan[name]
        return self._tables_of(window)[_key(node.row_set, node.layout)].batch(node.reads)

    def put(self, name: str, batch: object, window: int | None = None) -> None:
        """Store a node's output, for one window or for all rows. Columns that no node reads are left out.

        Rows that the stage must not return are refused, as are columns that are missing or cannot be sent.
        """
        node = self.plan[name]
        if not isinstance(batch, Batch):
            raise ValueError(
                f"{_place(node)} returned {type(batch).__name__}, not a Batch: "
                "end the stage with `return batch`, or `return batch.with_columns(...)`"
            )
        writer = name if node.spec.rows == "same" else node.row_set_after
        readers = self._readers.get(writer, {})
        tables = self._tables_of(window)
        table = tables[_key(node.row_set, node.layout)]
        _check_rows(node, batch, table)
        for column in node.writes:
            if column not in batch:
                raise ValueError(f"{_place(node)} did not write its column '{column}'")
            if column in readers:
                _check_column(node, column, batch)
        for column, reader in readers.items():
            if column not in batch:
                raise ValueError(
                    f"{_place(node)} lost column '{column}', which node '{reader}' reads: "
                    "a stage that changes rows hands on the columns it was given"
                )
        if node.spec.rows == "same":
            batch = Batch(batch.ids, {column: batch[column] for column in readers})
            table.add(batch, name)
        else:
            key, made = _key(writer, node.layout), RowTable.of(batch.only(readers), writer)
            tables[key] = RowTable.joined([tables[key], made]) if node.spec.rows == "join" and key in tables else made
            batch = tables[key].batch(dict.fromkeys(readers, writer))
        if name in self._sent and not self._is_continuous:
            self.compare(name, batch, self.transport.process_group(node.layout.ranks))

    def compare(self, name: str, batch: Batch, process_group: ProcessGroup) -> None:
        """Check that columns to be sent have one type on all ranks of a node, and each shard one set of rows.

        Where ranks generate continuously, they meet when the columns are sent.
        """
        if process_group.size == 1:
            return
        node, text = self.plan[name], schemas_to_json(batch)
        rows = digest(batch.ids.sort().values.numpy().tobytes())
        facts = np.array([digest(text.encode()), len(batch), rows], dtype=np.int64)
        unlike = find_unlike(process_group, node.layout, facts, f"what ranks put out of node '{node.name}'")
        if unlike.rows is not None:
            first = node.layout.shard(unlike.rows)[0]
            raise RuntimeError(
                f"{_place(node)}: ranks {first} and {unlike.rows} hold one shard, but put out different rows: "
                "the stage must do the same on both"
            )
        if unlike.types is not None:
            first, other = unlike.types
            known = process_group.broadcast_text(text, first, f"the columns of node '{node.name}'")
            raise RuntimeError(
                f"{_place(node)}: rank {other} put out columns of another type than rank {first}"
                f"{_difference(text, known)}"
            )

    def reshard(self, action: Reshard, agreeing: AbstractContextManager[object] | None = None) -> None:
        """Reshard columns. All ranks of both layouts call it, in the order of the plan.

        The context `agreeing` is entered until all of them have come.
        """
        self._reshard(action, self._tables, self.transport.process_group(action.ranks), agreeing=agreeing)

    def outgoing(self, channel: Channel) -> dict[Reshard, Batch]:
        """This rank's rows for the reshards of a channel of which it is a source; nothing is copied."""
        return {
            action: self._tables[_key(action.row_set, action.source_layout)].batch(
                dict.fromkeys(action.columns, action.source)
            )
            for action in channel.reshards
            if self.rank in action.source_layout
        }

    def incoming(self, channel: Channel) -> None:
        """Take an iteration of another loop out of a channel. All ranks of both ends take part."""
        for action in channel.reshards:
            if self.rank in action.target_layout:
                self._reshard(action, self._tables, self.transport.lane(channel.name, action.ranks))

    def _reshard(
        self,
        action: Reshard,
        tables: dict[TableKey, RowTable],
        process_group: ProcessGroup,
        earlier: EarlierWork | None = None,
        agreeing: AbstractContextManager[object] | None = None,
    ) -> None:
        sources = dict.fromkeys(action.columns, action.source)

        def rows_under(layout: Layout) -> Batch:
            return tables[_key(action.row_set, layout)].batch(sources)

        held = rows_under(action.source_layout) if self.rank in action.source_layout else None
        spare = next(map(rows_under, _spare_layouts(action, self.rank)), None)
        key = _key(action.row_set, action.target_layout)
        # Rows that are here already keep their owners: the target only gets further columns of them.
        target = tables.get(key) if self.rank in action.target_layout else None
        wanted = target.batch({}) if target is not None and action.target_layout.represents(self.rank) else None
        arrived = reshard(action, process_group, held, wanted, spare, earlier, agreeing)
        if arrived is None:
            return
        if target is None:
            tables[key] = RowTable.of(arrived, action.source)
        else:
            target.add(arrived, action.source)

    def open_windows(self, windowed: Windowed) -> None:
        """Divide the prompts that are here into windows."""
        self._windows = [{} for _ in range(windowed.num_windows)]
        for key, table in self._tables.items():
            for window, part in zip(self._windows, table.divided(windowed.num_windows), strict=True):
                window[key] = part
        edges = [action for action in windowed.body if isinstance(action, Reshard)]
        num_groups = self.plan.batch.prompts_per_step
        self._earlier = {
            edge: EarlierWork(np.zeros((edge.num_updates, edge.target_layout.dp), dtype=np.int64), num_groups)
            for edge in edges
        }

    def reshard_window(self, action: Reshard, window: int, timed: AbstractContextManager[object]) -> None:
        """Reshard columns of a window in the background, while at most one other window waits.

        All ranks of both layouts call it, in the order of the plan. The context `timed` is entered while rows are sent.
        """
        under_way = self._under_way.setdefault(action, deque())
        while len(under_way) >= WINDOWS_UNDER_WAY:  # bounds the memory of windows that wait
            under_way.popleft().result()
        process_group = self.transport.lane(WINDOWS, action.ranks)

        def reshard_now() -> None:
            with timed:
                self._reshard(action, self._windows[window], process_group, self._earlier[action])

        arrival = self._background.run(reshard_now)
        under_way.append(arrival)
        self._arrivals.setdefault((_key(action.row_set, action.target_layout), window), []).append(arrival)

    def wait(self, name: str, window: int) -> None:
        """Wait until the rows of a window that a node reads are here."""
        node = self.plan[name]
        with self.transport.activity.waiting(f"window {window + 1} of '{name}'"):
            for arrival in self._arrivals.pop((_key(node.row_set, node.layout), window), ()):
                arrival.result()

    def close_windows(self) -> None:
        """Wait until all windows are here, and make one table of them."""
        with self.transport.activity.waiting("the last windows"):
            self._background.run(lambda: None).result()  # runs behind all exchanges and releases
        self._arrivals.clear()
        self._under_way.clear()
        for key in list(self._windows[0]):
            parts = [window.pop(key) for window in self._windows]
            whole = self._tables.get(key)
            if whole is None:
                self._tables[key] = RowTable.joined(parts)
                continue
            left = parts[0].columns.keys()  # others were released window by window
            whole.drop([column for column in whole.columns if column not in left])
            for part in parts:
                part.drop(whole.columns)
            whole.columns |= RowTable.joined(parts).columns
        self._windows = []

    def _tables_of(self, window: int | None) -> dict[TableKey, RowTable]:
        return self._tables if window is None else self._windows[window]

    def end_round(self, repeat: Repeat) -> None:
        """Keep the groups chosen by a round of repeated nodes, and forget the rest of the round."""
        if self.rank in repeat.layout:
            chosen = self._tables.pop(_key(repeat.last, repeat.layout))
            self.surplus.add(chosen.batch(dict.fromkeys(self._readers.get(repeat.last, ()), repeat.last)))
        row_sets = {"data", *repeat.nodes}
        self._tables = {key: table for key, table in self._tables.items() if key[0] not in row_sets}

    def leave(self, repeat: Repeat) -> None:
        """Give the step its groups. All ranks of the last node call it together."""
        taken = self.surplus.take(repeat.num_groups, self.transport.process_group(repeat.layout.ranks))
        self._tables[_key(repeat.last, repeat.layout)] = RowTable.of(taken, repeat.last)

    def release(self, action: Action, window: int | None = None) -> None:
        """Free the columns whose last reader on this rank, an entry of the chain, has run.

        Columns of a window are freed in the background, after the reshards that may still read them.
        """
        if window is None:
            self._release(action, self._tables)
        elif action in self._released_after:
            self._background.run(partial(self._release, action, self._windows[window]))

    def _release(self, action: Action, tables: Mapping[TableKey, RowTable]) -> None:
        for key, column in self._released_after.get(action, ()):
            if key in tables:
                tables[key].drop([column])

    def clear(self) -> None:
        """Forget the step, but not the surplus of repeated nodes."""
        self._tables.clear()


def _key(row_set: str, layout: Layout) -> TableKey:
    return row_set, layout.ranks, layout.dp


def _place(node: PlannedNode) -> str:
    return f"node '{node.name}' (stage '{node.node.run}')"


def _difference(mine: str, other: str) -> str:
    """How this rank's columns differ from another's; empty if they do not."""
    here, there = (
        {str(column) for schema in json.loads(text) for column in schema_from_json(schema)} for text in (mine, other)
    )
    if here == there:
        return ""
    return ": {} instead of {}".format(*(", ".join(sorted(part)) or "nothing" for part in (here - there, there - here)))


def _spare_layouts(action: Reshard, rank: int) -> list[Layout]:
    """The layout, if any, in which a rank already has columns that it needs in another layout too."""
    spare = action.spare_layout
    return [spare] if spare is not None and rank in spare and rank in action.target_layout else []


def _check_rows(node: PlannedNode, batch: Batch, given: RowTable) -> None:
    """Check that samples point to the prompts that they answer, and that a filter adds no rows."""
    if node.spec.rows == "expand":
        if batch.prompts is None:
            raise ValueError(f"{_place(node)} put out samples that point to no prompts: give Batch its prompts")
        known, parents, what = given.ids if given.prompt_ids is None else given.prompt_ids, batch.prompts.ids, "prompt"
    elif node.spec.rows == "filter":
        known, parents, what = given.ids, batch.ids, "row"
    else:  # the table itself refuses to take other rows than it has, and new groups may be of anything
        return
    strange = parents[~torch.isin(parents, known)]
    if len(strange):
        raise ValueError(f"{_place(node)} put out {what} {int(strange[0])}, which it was not given")


def _check_column(node: PlannedNode, name: str, batch: Batch) -> None:
    """Check that every reader gets the same values, whether they are sent to it or not."""
    column: object = batch.columns[name] if name in batch.columns or batch.prompts is None else batch.prompts[name]
    if isinstance(column, Tensor | Jagged):
        return
    if not isinstance(column, tuple):
        raise ValueError(
            f"{_place(node)}: column '{name}' is {type(column).__name__}, but must be a tensor, a Jagged or a tuple of "
            "values"
        )
    for value in column:
        try:
            changed = what_changes(value)
        except RecursionError:
            changed = f"{type(value).__name__} that is nested too deeply"
        if changed:
            raise ValueError(
                f"{_place(node)}: column '{name}' holds {changed}, which would arrive as something else on another "
                "rank: use None, bool, int, float, str, lists, and dicts with text as keys"
            )


def _readers(plan: Plan) -> dict[str, dict[str, str]]:
    """For each node, the columns that other nodes read from it, and the first such reader."""
    readers: dict[str, dict[str, str]] = {}
    for node in plan.nodes:
        for column, source in node.reads.items():
            readers.setdefault(source, {}).setdefault(column, node.name)
    return readers


def _last_readers(plan: Plan, rank: int) -> dict[Action, list[tuple[TableKey, ColumnKey]]]:
    """For each entry of a rank's chain, the columns that no later entry reads."""
    last = {use: action for action in flat(plan.chain(rank)) for use in _reads(plan, action, rank)}  # the last wins
    released: dict[Action, list[tuple[TableKey, ColumnKey]]] = {}
    for use, action in last.items():
        released.setdefault(action, []).append(use)
    return released


def _reads(plan: Plan, action: Action, rank: int) -> Sequence[tuple[TableKey, ColumnKey]]:
    """The columns that an entry of the chain reads on a rank."""
    match action:
        case Push(name):
            reshards = [reshard for reshard in plan.channel(name).reshards if rank in reshard.source_layout]
            return [use for reshard in reshards for use in _reads(plan, reshard, rank)]
        case RunNode(name):
            node = plan[name]
            key = _key(node.row_set, node.layout)
            return [(key, (source, column)) for column, source in node.reads.items()]
        case Reshard():
            layouts = [action.source_layout] if rank in action.source_layout else []
            keys = [_key(action.row_set, layout) for layout in layouts + _spare_layouts(action, rank)]
            return [(key, (action.source, column)) for key in keys for column in action.columns]
        case _:
            return []


ColumnKey = tuple[str, str]
"""The node that wrote a column, and the column's name: two nodes may write the same name one after the other."""


@dataclass
class RowTable:
    """Rows in ascending order of their ids, and what nodes wrote about them.

    Attributes:
        ids: [n] int64, ascending.
        prompt_ids: [m] int64, the prompts that rows point to, ascending; None when rows are prompts.
        prompt_index: [n] int64, each row's place in `prompt_ids`.
        columns: The rows' own columns.
        prompt_columns: The prompts' columns. Other tables may hold the same tensors; each drops them by itself.
    """

    ids: Tensor
    prompt_ids: Tensor | None
    prompt_index: Tensor | None
    columns: dict[ColumnKey, Column] = field(default_factory=dict)
    prompt_columns: dict[ColumnKey, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, writer: str) -> RowTable:
        """The table of rows, in any order, that a node or the data made."""
        batch = sort_rows(batch, writer)
        if batch.prompts is None:
            table = cls(batch.ids, None, None)
        else:
            prompt_ids = batch.prompts.ids.sort().values
            table = cls(batch.ids, prompt_ids, torch.searchsorted(prompt_ids, batch.group_ids))
        table.add(batch, writer)
        return table

    def add(self, batch: Batch, writer: str) -> None:
        """Take in columns that a node wrote about the very rows that are here, and about their prompts."""
        batch = sort_rows(batch, writer)
        if not torch.equal(batch.ids, self.ids):
            raise ValueError(f"node '{writer}' must keep its {len(self.ids)} rows, but gave {len(batch)} others")
        self.columns |= {(writer, name): column for name, column in batch.columns.items()}
        if batch.prompts is not None:
            prompts = sort_rows(batch.prompts, writer)
            self.prompt_columns |= {(writer, name): column for name, column in prompts.columns.items()}

    def batch(self, sources: Mapping[str, str]) -> Batch:
        """The rows with the columns that a reader asks for; `sources` has the node that wrote each column."""
        own = {name: self.columns[source, name] for name, source in sources.items() if (source, name) in self.columns}
        if self.prompt_ids is None:
            return Batch(self.ids, own)
        others = {name: self.prompt_columns[source, name] for name, source in sources.items() if name not in own}
        return Batch(self.ids, own, Batch(self.prompt_ids, others), self.prompt_index)

    def drop(self, keys: Iterable[ColumnKey]) -> None:
        """Free columns that have no further reader."""
        for key in keys:
            self.columns.pop(key, None)
            self.prompt_columns.pop(key, None)

    def divided(self, num_parts: int) -> list[RowTable]:
        """The rows in parts of about equal size, in order; some may have no rows."""
        borders = [len(self.ids) * place // num_parts for place in range(num_parts + 1)]
        return [self._part(torch.arange(begin, end)) for begin, end in pairwise(borders)]

    def _part(self, index: Tensor) -> RowTable:
        columns = {key: select_rows(column, index) for key, column in self.columns.items()}
        prompt_index = None if self.prompt_index is None else self.prompt_index[index]  # prompts are shared, not copied
        return RowTable(self.ids[index], self.prompt_ids, prompt_index, columns, dict(self.prompt_columns))

    @classmethod
    def joined(cls, parts: Sequence[RowTable]) -> RowTable:
        """The rows of tables with the same columns, and no row in common; the parts give up their columns."""
        ids, order = torch.cat([part.ids for part in parts]).sort()
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise ValueError(f"row {int(twice[0])} is in several of the parts that are joined")
        joined = cls(ids, None, None)
        for key in list(parts[0].columns):
            joined.columns[key] = _merge([part.columns.pop(key) for part in parts], order)
        known = [part.prompt_ids for part in parts if part.prompt_ids is not None]
        if not known:
            return joined
        group_ids = torch.cat([prompts[part.prompt_index] for part, prompts in zip(parts, known, strict=True)])[order]
        # Parts of one table share their prompts.
        distinct = {id(prompts): (part, prompts) for part, prompts in zip(parts, known, strict=True)}.values()
        all_ids = np.concatenate([prompts for _, prompts in distinct])
        joined.prompt_ids, first = map(torch.from_numpy, np.unique(all_ids, return_index=True))
        joined.prompt_index = torch.searchsorted(joined.prompt_ids, group_ids)
        for key in list(parts[0].prompt_columns):
            joined.prompt_columns[key] = _merge([part.prompt_columns.pop(key) for part, _ in distinct], first)
        return joined


def _merge(columns: list[Column], index: Tensor) -> Column:
    """Some rows of several columns; one without rows may not know the type of its values."""
    return select_rows(concat_columns([column for column in columns if len(column)] or columns[:1]), index)


def sort_rows(batch: Batch, writer: str) -> Batch:
    """The rows that a node made, in ascending order of their ids, which must differ."""
    if bool((batch.ids[1:] > batch.ids[:-1]).all()):
        return batch
    batch = batch.select(torch.argsort(batch.ids))
    twice = batch.ids[1:][batch.ids[1:] == batch.ids[:-1]]
    if len(twice):
        raise ValueError(f"node '{writer}' put out row {int(twice[0])} twice")
    return batch
