r"""Which rank sends which part of which weight to whom.

Every rank computes the same route from names, shapes and layouts, without communication. Weights are sent in buckets,
in their order. If each rank wants its own block of a weight, it receives it from the ranks that hold it. If all ranks
of a layout want whole weights, each holder still sends every element once: to one of these ranks, which then gather
what each of them has received. Ranks that hold what they would receive send nothing.

    trainers   0    1    2      each element of a bucket leaves its holder once
                \  / \  /
    servers      3     4        each server receives half of the rows, then both gather both halves
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from leaderless.planner.layout import all_ranks
from leaderless.weights.blocks import Block, Pool, Shape, even_rows, whole_block

BUCKET_BYTES = 1 << 25
"""Most bytes of a bucket on one rank, except that a row is never divided."""


@dataclass(frozen=True)
class Turn:
    """Rows of each rank's block of a weight that are sent in one bucket: weights larger than it have several turns.

    Attributes:
        name: Name of the weight.
        first: First row, counted from the first one of each block.
        last: Row after the last one.
        is_last: Whether the weight is complete after this turn.
    """

    name: str
    first: int
    last: int
    is_last: bool


@dataclass(frozen=True)
class Piece:
    """Elements of a weight in one message."""

    name: str
    block: Block


@dataclass(frozen=True)
class Leg:
    """What a rank sends, receives and already has of a bucket.

    Attributes:
        sent: Pieces for each receiver.
        received: Pieces from each sender.
        own: Pieces that the rank both holds and wants.
    """

    sent: Mapping[int, Sequence[Piece]]
    received: Mapping[int, Sequence[Piece]]
    own: Sequence[Piece]


class Route:
    """The way of a role's weights from one layout to another."""

    def __init__(
        self,
        role: str,
        shapes: Mapping[str, Shape],
        holders: Pool,
        takers: Pool,
        dtype: torch.dtype,
        rank: int,
        *,
        is_gathered: bool = False,
    ) -> None:
        """Describe a way; what passes it is computed on first use.

        Args:
            role: Role, for errors.
            shapes: Shapes of the whole weights, by name, in their order.
            holders: Ranks that have the weights.
            takers: Ranks that want them.
            dtype: Type in which they are sent: that of the takers.
            rank: This rank, which is a holder, a taker or both.
            is_gathered: Whether the takers, who want everything, gather it among themselves.
        """
        self.role, self.shapes, self.holders, self.takers, self.dtype = role, shapes, holders, takers, dtype
        self.rank, self.is_gathered = rank, is_gathered
        self.receivers = Pool(takers.layout, even_rows) if self.is_gathered else takers
        """Ranks that receive weights from the holders, and the block that each receives."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return all_ranks(self.holders.layout, self.takers.layout)

    def rows(self, name: str) -> int:
        """Rows of the largest block that a rank receives."""
        shape, ranks = self.shapes[name], self.receivers.layout.ranks
        if self.is_gathered:
            return -(-shape[0] // len(ranks))
        return max(self.receivers.block(name, shape, rank).sizes[0] for rank in ranks)

    @cached_property
    def local(self) -> frozenset[str]:
        """Weights that are not sent, since all takers hold all of them."""
        ranks = self.takers.layout.ranks
        if not self.is_gathered or not set(ranks) <= set(self.holders.layout.ranks):
            return frozenset()
        return frozenset(
            name
            for name, shape in self.shapes.items()
            if all(self.holders.block(name, shape, rank).sizes == shape for rank in ranks)
        )

    @cached_property
    def buckets(self) -> Sequence[Sequence[Turn]]:
        """All weights in their order, as many at a time as fill a bucket, which has one turn of each at most."""
        buckets: list[list[Turn]] = [[]]
        room = BUCKET_BYTES
        for name in self.shapes:
            rows, num_bytes = self.rows(name), self._bytes_at_once(name)
            count = max(1, min(-(-num_bytes // BUCKET_BYTES), rows))
            for index in range(count):
                if buckets[-1] and (index or room < num_bytes // count):
                    buckets.append([])
                    room = BUCKET_BYTES
                first, last = rows * index // count, rows * (index + 1) // count
                buckets[-1].append(Turn(name, first, last, is_last=index == count - 1))
                room -= num_bytes // count
        return [bucket for bucket in buckets if bucket]

    def _bytes_at_once(self, name: str) -> int:
        """Bytes of a weight on the rank that needs most memory for it."""
        shape = self.shapes[name]
        if name in self.local:
            return 0
        if self.is_gathered:
            return whole_block(shape).numel * self.dtype.itemsize
        blocks = (pool.block(name, shape, rank) for pool in (self.holders, self.takers) for rank in pool.layout.ranks)
        return max(block.numel for block in blocks) * self.dtype.itemsize

    @cached_property
    def legs(self) -> Sequence[Leg]:
        """What this rank sends and receives of each bucket."""
        legs: list[Leg] = []
        for bucket in self.buckets:
            sent, received = dict[int, list[Piece]](), dict[int, list[Piece]]()
            for turn in bucket:
                for sender, receiver, block in self._parts(turn):
                    if sender == self.rank:
                        sent.setdefault(receiver, []).append(Piece(turn.name, block))
                    elif receiver == self.rank:
                        received.setdefault(sender, []).append(Piece(turn.name, block))
            own = sent.pop(self.rank, [])
            legs.append(Leg(dict(sorted(sent.items())), dict(sorted(received.items())), own))
        return legs

    def _parts(self, turn: Turn) -> Iterator[tuple[int, int, Block]]:
        """Sender, receiver and elements of what is sent in a turn, as far as this rank may be one of the two."""
        if turn.name in self.local:
            return
        shape, holding = self.shapes[turn.name], _Holding.of(self, turn.name)
        for receiver in self.receivers.layout.ranks if self.rank in self.holders.layout else (self.rank,):
            wanted = self.receivers.block(turn.name, shape, receiver).rows(turn.first, turn.last)
            if wanted.numel:
                yield from ((sender, receiver, block) for sender, block in holding.senders(wanted, receiver))


@dataclass(frozen=True)
class _Holding:
    """The different blocks of a weight, by their offsets, with the ranks that hold each.

    Attributes:
        blocks: Blocks, by their offsets.
        ranks: Ranks that hold each block.
        first: First row of each block.
        tallest: Most rows of a block.
    """

    blocks: Sequence[Block]
    ranks: Sequence[Sequence[int]]
    first: Sequence[int]
    tallest: int

    @classmethod
    def of(cls, route: Route, name: str) -> _Holding:
        shape, held = route.shapes[name], dict[Block, list[int]]()
        for rank in route.holders.layout.ranks:
            block = route.holders.block(name, shape, rank)
            if block.numel:
                held.setdefault(block, []).append(rank)
        if sum(block.numel for block in held) != whole_block(shape).numel:
            raise ValueError(
                f"role '{route.role}': the blocks of '{name}' {shape} on ranks {route.holders.layout.ranks} must be "
                "equal or disjoint, and cover it: correct the placement of its back end"
            )
        blocks = sorted(held, key=lambda block: block.offsets)
        tallest = max((block.sizes[0] for block in blocks), default=0)
        return cls(blocks, [held[block] for block in blocks], [block.offsets[0] for block in blocks], tallest)

    def senders(self, wanted: Block, receiver: int) -> Iterator[tuple[int, Block]]:
        """The holders of a block's elements, and the elements: the receiver itself, or one of several."""
        first, last = wanted.offsets[0], wanted.offsets[0] + wanted.sizes[0]
        # First rows ascend, and a block has at most as many rows as the tallest: only these can have any in common.
        for place in range(bisect_right(self.first, first - self.tallest), bisect_left(self.first, last)):
            common, ranks = wanted.common(self.blocks[place]), self.ranks[place]
            if common.numel:
                yield receiver if receiver in ranks else ranks[receiver % len(ranks)], common
