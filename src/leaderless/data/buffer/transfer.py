"""The bytes of one reshard, as one rank sends, receives and passes them on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.data.buffer.wire import ArrivingRows, ByteRuns, Bytes, HeldRows, Schema, ragged_keys, write
from leaderless.distributed.transport import ProcessGroup, Round
from leaderless.planner.assign.balance import Int
from leaderless.planner.assign.routes import Delivery, Parcel, RowRoutes
from leaderless.planner.memory.limits import PIECE_BYTES, ROUND_BYTES, ROUNDS_AHEAD

Lengths = NDArray[np.int32]
MAX_LENGTH = 2**31 - 1
"""Largest length that can be sent."""


@dataclass(frozen=True)
class _Link:
    """A parcel on its way to or from a peer.

    Attributes:
        peer: Rank at the other end.
        holder: Rank that represents the rows.
        leg: 0 for a parcel that comes from its holder, 1 for one that a peer of the receiver passes on.
        parcel: Places of the rows.
    """

    peer: int
    holder: int
    leg: int
    parcel: Parcel

    @property
    def delay(self) -> int:
        """Rounds to wait before the first piece is sent: what is passed on has to arrive first."""
        return self.leg * ROUNDS_AHEAD


class ReshardTransfer:
    """One reshard on one rank.

    Every parcel is a sequence of bytes, column after column, whose size both sides know. It is sent in pieces, one of
    each parcel at a time. A piece that is contiguous in memory is sent from its place, or received there; others are
    copied.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        routes: RowRoutes,
        schemas: Sequence[Schema],
        held: Batch | None,
        spare: Batch | None,
        what: str,
    ) -> None:
        """Determine what this rank sends, receives and forwards; arguments as of `reshard`."""
        self.process_group, self.routes, self.schemas, self.held, self.what = process_group, routes, schemas, held, what
        self.rank = process_group.rank
        self.keys = [(table, key) for table, schema in enumerate(schemas) for key in ragged_keys(schema)]
        self.here = [
            [HeldRows(table) for table in (batch, batch.prompts) if table is not None]
            for batch in (held, spare)
            if batch is not None
        ]
        self.mine = routes.delivery(self.rank) if self.rank in routes.target else None
        self.incoming = [] if self.mine is None else self._incoming(self.mine)
        self.outgoing = [*(() if held is None else self._sent()), *self._passed_on()]

    def _incoming(self, mine: Delivery) -> list[_Link]:
        """Parcels that arrive here; those from their holders are first, so that both ends of a pair have one order."""
        holders = [holder for holder in mine.all_senders if holder != self.rank]
        origins = [self.routes.relay(holder, self.rank) for holder in holders]
        links = [
            _Link(origin, holder, int(origin != holder), mine.from_rank(holder))
            for origin, holder in zip(origins, holders, strict=True)
        ]
        return sorted(links, key=lambda link: (link.leg, link.holder))

    def _sent(self) -> Iterator[_Link]:
        """Parcels that leave from here, except those that a peer of the receiver forwards."""
        for receiver in self.routes.receivers(self.rank):
            parcel = self.routes.delivery(receiver).from_rank(self.rank)
            if any(map(len, parcel)) and self.routes.relay(self.rank, receiver) == self.rank:
                yield _Link(receiver, self.rank, 0, parcel)

    def _passed_on(self) -> Iterator[_Link]:
        """Parcels from elsewhere that are passed on to peers which hold the same shard."""
        if self.mine is None or self.routes.target.ranks_per_shard == 1:
            return
        peers = self.routes.ranks_of_shard(self.routes.target.shard_of(self.rank))
        for link in self.incoming:
            for peer in peers if link.leg == 0 else ():
                if peer != self.rank and self.routes.relay(link.holder, peer) == self.rank:
                    yield _Link(peer, link.holder, 1, link.parcel)

    def run(self) -> Batch | None:
        """This rank's rows under the target layout, if it is part of that. All ranks of both layouts call it."""
        headers = self._exchange_lengths()
        kept = self._kept()
        arriving = [] if self.mine is None or kept is not None else self._allocate(self.mine, headers)
        self.process_group.exchange_rounds(self._rounds(arriving), self.what)
        if self.mine is None or kept is not None:
            return kept
        rows = arriving[0].batch()
        if len(arriving) == 1:
            return rows
        index = torch.from_numpy(np.searchsorted(self.mine.prompts, self.mine.group_ids))
        return Batch(rows.ids, rows.columns, arriving[1].batch(), index)

    def _kept(self) -> Batch | None:
        """The rows that are here, if they are the rows that this rank needs: the same tensors, not a copy."""
        if self.mine is None or self.held is None or self.incoming:
            return None
        num_prompts = len(self.held if self.held.prompts is None else self.held.prompts)
        is_same = np.array_equal(self.mine.ids, self.held.ids.numpy()) and num_prompts == len(self.mine.prompts)
        return self.held if is_same else None

    def _exchange_lengths(self) -> dict[int, Lengths]:
        """The lengths of all ragged rows that arrive here, by holder."""
        headers = {
            link.holder: np.empty(sum(len(link.parcel[table]) for table, _ in self.keys), dtype=np.int32)
            for link in self.incoming
        }
        for leg in (0, 1):
            sent = [
                (link.peer, _as_bytes(headers[link.holder] if leg else self._header(link)))
                for link in self.outgoing
                if link.leg == leg
            ]
            received = [(link.peer, _as_bytes(headers[link.holder])) for link in self.incoming if link.leg == leg]
            self.process_group.exchange_rounds([(sent, received)], self.what)
        return headers

    def _header(self, link: _Link) -> Lengths:
        """The lengths of a parcel's ragged rows."""
        places = self._places(link)
        parts = [self.here[0][table].lengths(key, places[table]) for table, key in self.keys]
        lengths = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
        if len(lengths) and lengths.max() > MAX_LENGTH:
            raise ValueError(f"{self.what}: a row has {lengths.max():,} values, more than {MAX_LENGTH:,} in a column")
        return lengths.astype(np.int32)

    def _places(self, link: _Link) -> list[Int]:
        """Where a parcel's rows, and its prompts, are on this rank."""
        wanted = self.routes.delivery(link.peer).tables
        return [
            table.places(ids[places]) for table, ids, places in zip(self.here[0], wanted, link.parcel, strict=False)
        ]

    def _allocate(self, mine: Delivery, headers: Mapping[int, Lengths]) -> list[ArrivingRows]:
        """Memory for what arrives; rows that are here already are in it."""
        lengths = {(table, key): np.zeros(len(mine.tables[table]), dtype=np.int64) for table, key in self.keys}
        for link in self.incoming:
            begin = 0
            for (table, _), values in lengths.items():
                places = link.parcel[table]
                values[places] = headers[link.holder][begin : begin + len(places)]
                begin += len(places)
        arriving: list[ArrivingRows] = []
        for table, (schema, ids, at) in enumerate(
            zip(self.schemas, mine.tables, mine.from_rank(self.rank), strict=False)
        ):
            found = self._own(table, ids, at)
            ragged = {key: values for (owner, key), values in lengths.items() if owner == table}
            for held, to, places in found:
                for key, values in ragged.items():
                    if key.startswith("axis "):  # objects are handed over as they are
                        values[to] = held.lengths(key, places)
            arriving.append(ArrivingRows(schema, ids, ragged))
            for held, to, places in found:
                arriving[-1].take(held, to, places)
        return arriving

    def _own(self, table: int, ids: Int, at: Int) -> list[tuple[HeldRows, Int, Int]]:
        """Which of the rows at some places are in which of the tables here, and where in it."""
        found: list[tuple[HeldRows, Int, Int]] = []
        for tables in self.here:
            places = tables[table].places(ids[at])
            is_here = places >= 0
            found.append((tables[table], at[is_here], places[is_here]))
            at = at[~is_here]
        assert not len(at), "a rank has the rows that it does not get from others"
        return found

    def _rounds(self, arriving: Sequence[ArrivingRows]) -> Iterator[Round]:
        """Pieces to send and to receive, round by round, and as many empty rounds as it takes until all is written.

        A piece that is passed on was received, and put in its place, in an earlier round.
        """
        incoming = {link.holder: _runs(arriving, link.parcel, self.schemas) for link in self.incoming}
        receiving = [(link, incoming[link.holder]) for link in self.incoming]
        sending = [
            (link, incoming[link.holder] if link.leg else _runs(self.here[0], self._places(link), self.schemas))
            for link in self.outgoing
        ]
        size = min(max(ROUND_BYTES // self.process_group.size, PIECE_BYTES[0]), PIECE_BYTES[1])
        num_rounds = max((link.delay - (-runs.size // size) for link, runs in (*sending, *receiving)), default=0)
        copied: deque[list[tuple[list[Bytes], Bytes]]] = deque()
        for number in range(num_rounds + ROUNDS_AHEAD):
            if len(copied) == ROUNDS_AHEAD:
                for parts, content in copied.popleft():
                    write(parts, content)
            sent = [(peer, torch.from_numpy(runs.read(*span))) for peer, runs, span in _pieces(sending, number, size)]
            received = []
            copied.append([])
            for peer, runs, (begin, end) in _pieces(receiving, number, size):
                parts = runs.parts(begin, end)
                content = parts[0] if len(parts) == 1 else np.empty(end - begin, dtype=np.uint8)
                if len(parts) > 1:
                    copied[-1].append((parts, content))
                received.append((peer, torch.from_numpy(content)))
            yield sent, received


def _as_bytes(lengths: Lengths) -> Tensor:
    return torch.from_numpy(lengths.view(np.uint8))


def _runs(tables: Sequence[HeldRows | ArrivingRows], rows: Sequence[Int], schemas: Sequence[Schema]) -> ByteRuns:
    """The bytes of some rows and of some prompts."""
    return ByteRuns(
        [
            (table.column(column.name), places)
            for table, places, schema in zip(tables, rows, schemas, strict=False)
            for column in schema
        ]
    )


def _pieces(
    parcels: Sequence[tuple[_Link, ByteRuns]], number: int, size: int
) -> Iterator[tuple[int, ByteRuns, tuple[int, int]]]:
    """The peer, and the part of each parcel that is sent in a round."""
    for link, runs in parcels:
        begin = (number - link.delay) * size
        if 0 <= begin < runs.size:
            yield link.peer, runs, (begin, min(begin + size, runs.size))
