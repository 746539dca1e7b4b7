"""The bytes of one change of layout, as one rank sends, receives and passes them on.

Every parcel is a sequence of bytes, column after column, whose size both sides know. It travels in pieces, one piece of
each parcel at a time. A piece that lies together in memory is sent from there, or received there; others go through a
small buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.data.byte_runs import ByteRuns, Bytes, Int
from leaderless.data.column_store import ArrivingRows, HeldRows, ragged_keys
from leaderless.data.routes import Delivery, Parcel, Routes
from leaderless.data.transport import ROUNDS_AHEAD, ProcessGroup, Round
from leaderless.data.wire import Schema

ROUND_BYTES = 1 << 25
"""What a rank sends to all its peers in one round, and what it receives, about."""
PIECE_BYTES = (1 << 16, 1 << 22)
"""Least and most of that for one parcel."""
MAX_LENGTH = 2**31 - 1
"""Lengths travel as int32."""


@dataclass(frozen=True)
class _Link:
    """A parcel on its way to or from a peer.

    Attributes:
        peer: The rank at the other end.
        runs: The parcel's bytes on this rank.
        delay: Rounds behind the first, for a parcel that is passed on.
    """

    peer: int
    runs: ByteRuns
    delay: int


class Transfer:
    """One change of layout on one rank."""

    def __init__(
        self,
        process_group: ProcessGroup,
        routes: Routes,
        schemas: Sequence[Schema],
        held: Batch | None,
        spare: Batch | None,
        what: str,
    ) -> None:
        """Find out what this rank sends, receives and passes on.

        Args:
            process_group: The ranks of both layouts.
            routes: Way of every row.
            schemas: Schema of rows, and of prompts if rows are samples.
            held: Rows that this rank has under the source layout.
            spare: Rows that it has from an earlier change of layout.
            what: Name of the edge, for errors.
        """
        self.process_group, self.routes, self.schemas, self.held, self.what = process_group, routes, schemas, held, what
        self.rank = process_group.rank
        self.here = [
            [HeldRows(table) for table in (batch, batch.prompts) if table is not None]
            for batch in (held, spare)
            if batch is not None
        ]
        self.mine = routes.delivery(self.rank) if self.rank in routes.target else None
        self.sent = {} if held is None else self._sent()
        self.received = {} if self.mine is None else self._received(self.mine)
        self.passed_on = self._passed_on()

    def _sent(self) -> dict[int, Parcel]:
        """Parcels that leave from here, by receiver, those left out that a peer of the receiver passes on."""
        parcels: dict[int, Parcel] = {}
        for receiver in self.routes.receivers(self.rank):
            parcel = self.routes.parcel(self.rank, receiver)
            if parcel and self.routes.relay(self.rank, receiver) == self.rank:
                parcels[receiver] = parcel
        return parcels

    def _received(self, mine: Delivery) -> dict[int, tuple[int, Parcel]]:
        """Parcels that arrive here, by the rank that represents the rows, each with the rank that it comes from.

        Those that come straight from that rank are first: at both ends the parcels of a pair are in this order.
        """
        parcels = {sender: mine.from_rank(sender) for sender in mine.all_senders if sender != self.rank}
        origins = {sender: self.routes.relay(sender, self.rank) for sender in parcels}
        in_order = sorted(parcels, key=lambda sender: (origins[sender] != sender, sender))
        return {sender: (origins[sender], parcels[sender]) for sender in in_order}

    def _passed_on(self) -> list[tuple[int, int]]:
        """Parcels that are passed on to peers: the rank that represents the rows, and the peer."""
        shard = self.routes.ranks_of_shard(self.routes.target.shard_of(self.rank)) if self.received else ()
        return [
            (sender, peer)
            for sender, (origin, _) in self.received.items()
            if origin == sender
            for peer in shard
            if peer not in {self.rank, sender}
            and self.routes.parcel(sender, peer)
            and self.routes.relay(sender, peer) == self.rank
        ]

    def run(self) -> Batch | None:
        """Do it, together with all ranks of both layouts.

        Returns:
            This rank's rows under the target layout, or None when it is not part of that.
        """
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
        """The rows that are here, when they are those that are to be here: the same tensors, not a copy."""
        if self.mine is None or self.held is None or self.received:
            return None
        num_prompts = len(self.held if self.held.prompts is None else self.held.prompts)
        is_same = np.array_equal(self.mine.ids, self.held.ids.numpy()) and num_prompts == len(self.mine.prompts)
        return self.held if is_same else None

    def _keys(self) -> list[tuple[int, str]]:
        """What has lengths: table and key."""
        return [(table, key) for table, schema in enumerate(self.schemas) for key in ragged_keys(schema)]

    def _exchange_lengths(self) -> dict[int, Tensor]:
        """The lengths of all ragged rows that arrive here, by the rank that represents them."""
        headers = {
            sender: torch.empty(sum(len(parcel.places[table]) for table, _ in self._keys()), dtype=torch.int32)
            for sender, (_, parcel) in self.received.items()
        }
        as_bytes = {sender: header.view(torch.uint8) for sender, header in headers.items()}
        sent = [(receiver, self._header(receiver, parcel)) for receiver, parcel in self.sent.items()]
        for is_passed_on in (False, True):
            received = [
                (origin, as_bytes[sender])
                for sender, (origin, _) in self.received.items()
                if (origin != sender) == is_passed_on
            ]
            self.process_group.exchange_rounds([(sent, received)], self.what)
            sent = [(peer, as_bytes[sender]) for sender, peer in self.passed_on]
        return headers

    def _header(self, receiver: int, parcel: Parcel) -> Tensor:
        """The lengths of a parcel's ragged rows."""
        places = self._places(receiver, parcel)
        parts = [self.here[0][table].lengths(key, places[table]) for table, key in self._keys()]
        lengths = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
        if len(lengths) and lengths.max() > MAX_LENGTH:
            raise ValueError(f"{self.what}: a row has {lengths.max():,} values, more than {MAX_LENGTH:,} in a column")
        return torch.from_numpy(lengths.astype(np.int32).view(np.uint8))

    def _places(self, receiver: int, parcel: Parcel) -> list[Int]:
        """Where a parcel's rows are in each table that this rank holds."""
        wanted = self.routes.delivery(receiver).tables
        return [
            table.places(ids[places]) for table, ids, places in zip(self.here[0], wanted, parcel.places, strict=False)
        ]

    def _allocate(self, mine: Delivery, headers: Mapping[int, Tensor]) -> list[ArrivingRows]:
        """Memory for what arrives; rows that are here already are in it."""
        lengths = {(table, key): np.zeros(len(mine.tables[table]), dtype=np.int64) for table, key in self._keys()}
        for sender, (_, parcel) in self.received.items():
            sizes = [len(parcel.places[table]) for table, _ in lengths]
            for (table, _), values, part in zip(
                lengths, lengths.values(), torch.split(headers[sender], sizes), strict=True
            ):
                values[parcel.places[table]] = part.numpy()
        arriving: list[ArrivingRows] = []
        own = mine.from_rank(self.rank).places
        for table, (schema, ids) in enumerate(zip(self.schemas, mine.tables, strict=False)):
            found = self._own(table, ids, own[table])
            ragged = {key: values for (owner, key), values in lengths.items() if owner == table}
            for held, at, places in found:
                for key, values in ragged.items():
                    if key.startswith("axis "):  # objects are handed over as they are
                        values[at] = held.lengths(key, places)
            arriving.append(ArrivingRows(schema, ids, ragged))
            for held, at, places in found:
                arriving[-1].take(held, at, places)
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
        """Pieces to send and to receive, round by round."""
        incoming = {sender: _arriving_runs(arriving, parcel) for sender, (_, parcel) in self.received.items()}
        receiving = [
            _Link(origin, incoming[sender], 0 if origin == sender else ROUNDS_AHEAD)
            for sender, (origin, _) in self.received.items()
        ]
        sending = [_Link(receiver, self._held_runs(receiver, parcel), 0) for receiver, parcel in self.sent.items()]
        sending += [_Link(peer, incoming[sender], ROUNDS_AHEAD) for sender, peer in self.passed_on]
        return _Pieces(receiving, sending, self.process_group.size).rounds()

    def _held_runs(self, receiver: int, parcel: Parcel) -> ByteRuns:
        tables = zip(self.here[0], self.schemas, self._places(receiver, parcel), strict=True)
        return ByteRuns([(held.column(column.name), places) for held, schema, places in tables for column in schema])


def _arriving_runs(arriving: Sequence[ArrivingRows], parcel: Parcel) -> ByteRuns:
    tables = zip(arriving, parcel.places, strict=False)
    return ByteRuns([(table.column(column.name), places) for table, places in tables for column in table.schema])


class _Pieces:
    """Cuts parcels into pieces. A piece that is passed on was received, and put in its place, in an earlier round."""

    def __init__(self, receiving: Sequence[_Link], sending: Sequence[_Link], num_ranks: int) -> None:
        self.receiving, self.sending = receiving, sending
        self.size = min(max(ROUND_BYTES // num_ranks, PIECE_BYTES[0]), PIECE_BYTES[1])
        self._buffers: list[list[Tensor]] = [[] for _ in range(ROUNDS_AHEAD)]
        self._staged: list[list[tuple[ByteRuns, int, Bytes]]] = [[] for _ in range(ROUNDS_AHEAD)]

    def rounds(self) -> Iterator[Round]:
        """All rounds, and as many empty ones as it takes until the last is done."""
        links = [*self.receiving, *self.sending]
        num_rounds = max((link.delay - (-link.runs.size // self.size) for link in links), default=0)
        for number in range(num_rounds + ROUNDS_AHEAD):
            slot = number % ROUNDS_AHEAD
            for runs, begin, content in self._staged[slot]:
                runs.write(begin, content)
            self._staged[slot] = []
            free = iter(list(self._buffers[slot]))
            sent = [
                (link.peer, self._outgoing(link, span, slot, free)) for link, span in self._spans(self.sending, number)
            ]
            received = [
                (link.peer, self._incoming(link, span, slot, free))
                for link, span in self._spans(self.receiving, number)
            ]
            yield sent, received

    def _spans(self, links: Sequence[_Link], number: int) -> Iterator[tuple[_Link, tuple[int, int]]]:
        """The part of each parcel that travels in a round."""
        for link in links:
            begin = (number - link.delay) * self.size
            if 0 <= begin < link.runs.size:
                yield link, (begin, min(begin + self.size, link.runs.size))

    def _outgoing(self, link: _Link, span: tuple[int, int], slot: int, free: Iterator[Tensor]) -> Tensor:
        lying = link.runs.view(*span)
        if lying is None:
            lying = self._buffer(span, slot, free)
            link.runs.read(span[0], lying)
        return torch.from_numpy(lying)

    def _incoming(self, link: _Link, span: tuple[int, int], slot: int, free: Iterator[Tensor]) -> Tensor:
        lying = link.runs.view(*span)
        if lying is None:
            lying = self._buffer(span, slot, free)
            self._staged[slot].append((link.runs, span[0], lying))
        return torch.from_numpy(lying)

    def _buffer(self, span: tuple[int, int], slot: int, free: Iterator[Tensor]) -> Bytes:
        """A buffer of this slot that no other piece of the round uses; they are used again round after round."""
        buffer = next(free, None)
        if buffer is None:
            buffer = torch.empty(self.size, dtype=torch.uint8)
            self._buffers[slot].append(buffer)
        lying: Bytes = buffer[: span[1] - span[0]].numpy()
        return lying
