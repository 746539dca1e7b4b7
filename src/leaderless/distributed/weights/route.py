r"""Which rank sends which part of which weight to whom.

Every rank computes its part of the route from names, shapes and layouts, without communication, and without a look at
ranks with which it exchanges nothing. Weights are sent in buckets, in their order. If each rank wants its own block of
a weight, it receives it from the ranks that hold it. If all ranks of a layout want whole weights, each holder still
sends every element once: to one of these ranks, which then gather what each of them has received. Ranks that hold what
they would receive send nothing.

    trainers   0    1    2      each element of a bucket leaves its holder once
                \  / \  /
    servers      3     4        each server receives half of the rows, then both gather both halves

    weights    a  b  c, larger than a bucket   d
    buckets   [ a b ] [ c 0-3 ] [ c 4-7 ] [ c 8-11 d ]     turns of c: rows of every rank's block
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from leaderless.distributed.weights.blocks import Pool, Shape, WeightBlock, WeightDivision, even_rows, whole_block
from leaderless.distributed.weights.sent import SentWeights, Traffic
from leaderless.planner.layout import all_ranks
from leaderless.planner.memory.limits import DEVICE_WEIGHT_BUCKET_BYTES as DEVICE_BUCKET_BYTES
from leaderless.planner.memory.limits import WEIGHT_BUCKET_BYTES as BUCKET_BYTES


def bucket_bytes(device: torch.device) -> int:
    """Most bytes of a bucket that is sent from and to the memory of a device, of the same kind on all ranks."""
    return BUCKET_BYTES if device.type == "cpu" else DEVICE_BUCKET_BYTES


@dataclass(frozen=True)
class RouteTurn:
    """Rows of each rank's block of a weight that are sent in one bucket: weights larger than it have several turns.

    Rows are counted from the first one of each block, and `last` is the one behind them.
    """

    name: str
    first: int
    last: int
    is_last: bool


@dataclass(frozen=True)
class WeightPiece:
    """Elements of a weight in one message."""

    name: str
    block: WeightBlock


@dataclass(frozen=True)
class RouteLeg:
    """Parts of a bucket: pieces for each receiver, from each sender, and those that the rank both holds and wants."""

    sent: Mapping[int, Sequence[WeightPiece]]
    received: Mapping[int, Sequence[WeightPiece]]
    own: Sequence[WeightPiece]


class WeightRoute:
    """The way of a role's weights from one layout to another.

    Args:
        what: Name of the weights for errors and the live page, such as "weights of role 'policy'".
        shapes: Shapes of the whole weights, by name, in their order.
        holders: Ranks that have the weights.
        takers: Ranks that want them.
        dtype: Type in which they are sent, the takers' own.
        rank: This rank, which is a holder, a taker or both.
        is_gathered: Whether the takers, who want everything, gather it among themselves.

    Attributes:
        sent: Numbers that this rank has sent last, on all ranks of a route where differences from them are sent; None
            on those of a route where all numbers are sent each time.
        traffic: All messages that this rank has sent.
    """

    def __init__(
        self,
        what: str,
        shapes: Mapping[str, Shape],
        holders: Pool,
        takers: Pool,
        dtype: torch.dtype,
        rank: int,
        *,
        is_gathered: bool = False,
    ) -> None:
        self.what, self.shapes, self.holders, self.takers, self.dtype = what, shapes, holders, takers, dtype
        self.rank, self.is_gathered = rank, is_gathered
        self.sent: SentWeights | None = None
        self.traffic = self._taken = Traffic()
        self._buckets = dict[int, Sequence[Sequence[RouteTurn]]]()
        self._legs = dict[int, Sequence[RouteLeg]]()
        # Takers that gather receive rows of their own, however the holders divide the weights: so nothing is sent
        # twice.
        self.receivers = Pool(takers.layout, even_rows) if self.is_gathered else takers
        """Ranks that receive weights from the holders, and the block that each receives."""

    def take_traffic(self) -> Traffic:
        """The messages that this rank has sent since the last call."""
        total = self.traffic  # another thread may be sending
        new, self._taken = total - self._taken, total
        return new

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return all_ranks(self.holders.layout, self.takers.layout)

    def rows(self, name: str) -> int:
        """Rows of the largest block that a rank receives."""
        return self.receivers.division(name, self.shapes[name]).block(0).sizes[0]

    @cached_property
    def local(self) -> frozenset[str]:
        """Weights that are not sent, since all takers hold all of them."""
        holders, takers = self.holders.layout, self.takers.layout
        if not self.is_gathered or not set(takers.ranks) <= set(holders.ranks):
            return frozenset()
        # If the first and the last of them hold a whole weight, those between them do, too.
        ends, block = {takers.ranks[0], takers.ranks[-1]}, self.holders.block
        return frozenset(
            name for name, shape in self.shapes.items() if all(block(name, shape, end).sizes == shape for end in ends)
        )

    def buckets(self, most_bytes: int) -> Sequence[Sequence[RouteTurn]]:
        """All weights in their order, as many at a time as fill a bucket, which has one turn of each at most."""
        if most_bytes in self._buckets:
            return self._buckets[most_bytes]
        buckets: list[list[RouteTurn]] = [[]]
        room = most_bytes
        for name in self.shapes:
            rows, num_bytes = self.rows(name), self._bytes_at_once(name)
            # A row is not divided. A weight that is not sent has a turn without bytes, which keeps its place in the
            # order.
            count = max(1, min(-(-num_bytes // most_bytes), rows))
            for index in range(count):
                # A bucket finds memory by the name of a weight, so that it has one turn of each.
                if buckets[-1] and (index or room < num_bytes // count):
                    buckets.append([])
                    room = most_bytes
                first, last = rows * index // count, rows * (index + 1) // count
                buckets[-1].append(RouteTurn(name, first, last, is_last=index == count - 1))
                room -= num_bytes // count
        self._buckets[most_bytes] = [bucket for bucket in buckets if bucket]
        return self._buckets[most_bytes]

    def _bytes_at_once(self, name: str) -> int:
        """Bytes of a weight on the rank that needs most memory for it."""
        shape = self.shapes[name]
        if name in self.local:
            return 0
        if self.is_gathered:
            return whole_block(shape).numel * self.dtype.itemsize
        largest = (pool.division(name, shape).block(0) for pool in (self.holders, self.takers))
        return max(block.numel for block in largest) * self.dtype.itemsize

    def legs(self, most_bytes: int) -> Sequence[RouteLeg]:
        """Parts of each bucket that this rank sends and receives."""
        if most_bytes in self._legs:
            return self._legs[most_bytes]
        self._legs[most_bytes] = legs = list[RouteLeg]()
        for bucket in self.buckets(most_bytes):
            sent, received = dict[int, list[WeightPiece]](), dict[int, list[WeightPiece]]()
            for turn in bucket:
                # Between two ranks goes one piece of a turn at most. So both list the pieces of a message in the same
                # order, that of the turns, and the message needs no header.
                for sender, receiver, block in self._parts(turn):
                    if sender == self.rank:
                        sent.setdefault(receiver, []).append(WeightPiece(turn.name, block))
                    elif receiver == self.rank:
                        received.setdefault(sender, []).append(WeightPiece(turn.name, block))
            # What a rank sends to itself is copied, and in no message.
            own = sent.pop(self.rank, [])
            legs.append(RouteLeg(dict(sorted(sent.items())), dict(sorted(received.items())), own))
        return legs

    def _parts(self, turn: RouteTurn) -> Iterator[tuple[int, int, WeightBlock]]:
        """Sender, receiver and elements of what this rank sends, receives or both holds and wants in a turn."""
        if turn.name in self.local:
            return
        shape = self.shapes[turn.name]
        held, wanted = (pool.division(turn.name, shape) for pool in (self.holders, self.receivers))
        if self.rank in self.receivers.layout:
            block = self.receivers.block(turn.name, shape, self.rank).rows(turn.first, turn.last)
            for number in held.touching(block):
                yield self._sender(held, number, self.rank), self.rank, block.common(held.block(number))
        if self.rank in self.holders.layout:
            number = held.number_of(self.holders.layout.place(self.rank))
            for receiver in self._receivers(held, number, wanted):
                block = self.receivers.block(turn.name, shape, receiver).rows(turn.first, turn.last)
                common = block.common(held.block(number))
                # Several ranks may hold the block: only one of them sends it.
                if common.numel and receiver != self.rank and self._sender(held, number, receiver) == self.rank:
                    yield self.rank, receiver, common

    def _sender(self, held: WeightDivision, number: int, receiver: int) -> int:
        """The rank that sends a block, or a part of it: the receiver itself, or one of those that hold it, in turn."""
        layout, places = self.holders.layout, held.places(number)
        # Nothing is sent to a rank that has it. Else the receiver's place chooses among the holders: they share the
        # work evenly, and all ranks know who sends without asking.
        if receiver in layout and layout.place(receiver) in places:
            return receiver
        return layout.ranks[places[self.receivers.layout.place(receiver) % len(places)]]

    def _receivers(self, held: WeightDivision, number: int, wanted: WeightDivision) -> Iterator[int]:
        """The ranks to which this rank sends from its block, and those that it would send to if they had none."""
        layout, places, numbers = self.receivers.layout, held.places(number), wanted.touching(held.block(number))
        mine = places.index(self.holders.layout.place(self.rank))
        # Blocks with consecutive numbers lie on consecutive places. So every len(places)-th place from the first one
        # that falls to this rank is a receiver, and no rank looks at the places between.
        if isinstance(numbers, range) and numbers:
            first, last = wanted.places(numbers[0])[0], wanted.places(numbers[-1])[-1]
            yield from layout.ranks[first + (mine - first) % len(places) : last + 1 : len(places)]
        else:
            wanting = (place for number in numbers for place in wanted.places(number))
            yield from (layout.ranks[place] for place in wanting if place % len(places) == mine)
