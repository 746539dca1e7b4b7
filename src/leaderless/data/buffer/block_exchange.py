"""Conversations of many ranks in which each sends to few: to its own block, and to one or two ranks of every block.

A conversation is a generator that yields the messages of a rank and is sent the messages that arrived. Its caller
carries them: a process group, or a test in which one process plays all ranks.

    column     0  1  2
    block 0    0  1  2     to_block    4 sends to 3 and 5
    block 1    3  4  5     across      4 sends to 1 and 7
    block 2    6  7  8     route       4 sends to 2 by way of 5: its own block, the column of 2
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from leaderless.distributed.transport import ProcessGroup
from leaderless.planner.assign.balance import Int
from leaderless.planner.assign.blocks import Mesh

Result = TypeVar("Result")


@dataclass(frozen=True)
class ExchangeLeg:
    """Messages of a place to other places, [k] numbers each, and the places from which it receives."""

    sent: Mapping[int, Int]
    senders: Sequence[int]


Talk = Generator[ExchangeLeg, Mapping[int, Int], Result]


@dataclass(frozen=True)
class MeshPosition:
    """One place of a mesh, and the legs in which it takes part. Rows are [n, width] integers."""

    mesh: Mesh
    number: int

    @cached_property
    def block(self) -> int:
        """Block of the place."""
        return int(self.mesh.blocks(np.array([self.number]))[0])

    @cached_property
    def column(self) -> int:
        """Column of the place."""
        return self.number - int(self.mesh.begins[self.block])

    @cached_property
    def _above(self) -> list[int]:
        above: list[int] = self.mesh.above(self.number).tolist()
        return above

    @cached_property
    def _below(self) -> list[int]:
        below: list[int] = self.mesh.below(self.number).tolist()
        return below

    def at(self, blocks: Int) -> Int:
        """The place in each block that has this place's column, or stands in for it."""
        return self.mesh.at(blocks, self.column)

    def to_block(self, rows: Int) -> Talk[list[Int]]:
        """Send rows to the whole block; returns the rows of each of its places, in order."""
        members = self.mesh.members(self.block)
        width = rows.shape[1]
        # All places list the rows in one order, that of the members, so that they compute the same from them.
        received = yield from self._leg(dict.fromkeys(members, rows.reshape(-1)), members)
        return [received[member].reshape(-1, width) for member in members]

    def across(self, row: Int) -> Talk[Int]:
        """The rows of all blocks, [num_blocks, width]; all places of a block give the same row."""
        received = yield from self._leg(dict.fromkeys(self._below, row), self._above)
        return np.stack([received[place] for place in self._above])

    def route(self, destinations: Int, rows: Int) -> Talk[Int]:
        """Send each row to a place, through this block's place in its column; returns the rows that arrive here."""
        members, width = self.mesh.members(self.block), rows.shape[1]
        # First within the block to the column of the destination, then along that column: a place sends to about twice
        # the square root of all places, and never to all of them.
        via = self.mesh.at(self.block, self.mesh.columns(destinations))
        # The destination travels with each row: the place in between has to send it on.
        parcels = _parcels(via, np.concatenate([destinations[:, None], rows], axis=1), members)
        received = yield from self._leg(parcels, members)
        passing = np.concatenate([received[member] for member in members]).reshape(-1, width + 1)
        parcels = _parcels(passing[:, 0], passing[:, 1:], self._below)
        received = yield from self._leg(parcels, self._above)
        return np.concatenate([received[place] for place in self._above]).reshape(-1, width)

    def _leg(self, sent: Mapping[int, Int], senders: Sequence[int]) -> Talk[dict[int, Int]]:
        """Send and receive; messages for this place itself stay."""
        received = yield ExchangeLeg(
            {place: numbers for place, numbers in sent.items() if place != self.number},
            [place for place in senders if place != self.number],
        )
        return {**received, self.number: sent[self.number]} if self.number in senders else dict(received)


def _parcels(places: Int, rows: Int, to: Sequence[int]) -> dict[int, Int]:
    """The rows for each place, as numbers; some get none."""
    # Empty ones too: a place that waits for a message does not know that there are no rows for it.
    order = np.argsort(places, kind="stable")
    rows, places = rows[order], places[order]
    begins, ends = (np.searchsorted(places, np.asarray(to), side=side).tolist() for side in ("left", "right"))
    return {place: rows[begin:end].reshape(-1) for place, begin, end in zip(to, begins, ends, strict=True)}


def hold(process_group: ProcessGroup, talk: Talk[Result], what: str) -> Result:
    """Hold a conversation among the ranks of a process group, over host memory; all of them call it together."""
    # The host computes with the numbers: through a device they would only be copied twice more.
    ranks, group = process_group.ranks, replace(process_group, payload_device=torch.device("cpu"))
    try:
        leg = next(talk)
        while True:
            messages = {ranks[place]: torch.from_numpy(_bytes(numbers)) for place, numbers in leg.sent.items()}
            received = group.exchange(messages, [ranks[place] for place in leg.senders], what)
            leg = talk.send({place: received[ranks[place]].numpy().view(np.int64) for place in leg.senders})
    except StopIteration as end:
        result: Result = end.value
        return result


def exchange_unannounced(messages: Mapping[int, Tensor], process_group: ProcessGroup, what: str) -> dict[int, Tensor]:
    """Send messages to ranks that do not know who sends to them; all ranks of the process group call it together.

    Only the sizes go through blocks. The messages themselves go straight to their receivers, over host memory.

    Args:
        messages: [num_bytes] uint8 for each receiver, as numbered in the whole run; this rank may be one.
        process_group: All ranks that may send or receive.
        what: Name of the messages, for errors.

    Returns:
        The messages that have come, by their senders, ascending.
    """
    ranks, own = np.array(process_group.ranks), process_group.rank
    others = {rank: message for rank, message in sorted(messages.items()) if rank != own}
    place = MeshPosition(Mesh(len(ranks)), process_group.ranks.index(own))
    sizes = np.array([[place.number, len(message)] for message in others.values()], dtype=np.int64).reshape(-1, 2)
    found = hold(process_group, place.route(np.searchsorted(ranks, list(others)).astype(np.int64), sizes), what)
    # Now each receiver knows who sends to it, and how many bytes, so that the messages go straight there.
    senders = zip(ranks[found[:, 0]].tolist(), found[:, 1].tolist(), strict=True)
    received = {sender: torch.empty(size, dtype=torch.uint8) for sender, size in sorted(senders)}
    group = replace(process_group, payload_device=torch.device("cpu"))
    group.exchange_rounds([([*others.items()], [*received.items()])], what)
    here = {own: messages[own]} if own in messages else {}
    return dict(sorted({**received, **here}.items()))


def _bytes(numbers: Int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.ascontiguousarray(numbers, dtype=np.int64).reshape(-1).view(np.uint8)
