"""Where every row of a reshard is and where it goes; all its ranks compute the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.assign.balance import Int, distinct, is_among
from leaderless.planner.layout import Layout

Parcel = tuple[Int, Int]
"""Rows and prompts that one rank sends to another: places among the receiver's rows and prompts, each ascending."""


@dataclass(frozen=True)
class Delivery:
    """Rows that one rank of the target layout gets, and their senders.

    Attributes:
        ids: [n] ids of its rows, ascending.
        group_ids: [n] id of each row's prompt.
        senders: [n] rank that sends each row; the receiver itself for rows that it has already.
        prompts: [m] ids of its prompts, ascending.
        prompt_senders: [m] rank that sends each prompt.
    """

    ids: Int
    group_ids: Int
    senders: Int
    prompts: Int
    prompt_senders: Int

    @property
    def tables(self) -> tuple[Int, Int]:
        """Ids of the rows, and of their prompts."""
        return self.ids, self.prompts

    @property
    def all_senders(self) -> list[int]:
        """The ranks that send anything, ascending."""
        ranks: list[int] = np.unique(np.concatenate([self.senders, self.prompt_senders])).tolist()
        return ranks

    def from_rank(self, sender: int) -> Parcel:
        """Sent bytes of one rank."""
        return np.flatnonzero(self.senders == sender), np.flatnonzero(self.prompt_senders == sender)


class SentBytes(NamedTuple):
    """Rows or prompts that ranks get: [k] place of each on the edge, and the ranks that it goes between.

    Ids ascend for each receiver. A sender is the receiver itself if that has it already.
    """

    places: Int
    senders: Int
    receivers: Int


@dataclass(frozen=True)
class RowRoutes:
    """For rows of the edge, in any order: their ids, their groups, who has them, who gets them.

    A rank knows all rows of every group of which it has, represents or gets a row; where ranks are few, it knows all.

    Attributes:
        ids: [n] ids of the rows.
        group_ids: [n] ids of their prompts.
        holders: [n] rank that represents each row.
        owners: [n] shard of the target layout that gets the row.
        source: Layout that rows leave.
        target: Layout that rows enter.
        hosts: Number of each rank's machine.
        spares: Ids of the rows that each rank already has from an earlier reshard.
        first_holder: Lowest rank that represents any row of the edge.
    """

    ids: Int
    group_ids: Int
    holders: Int
    owners: Int
    source: Layout
    target: Layout
    hosts: Mapping[int, int]
    spares: Mapping[int, Int] = field(default_factory=dict)
    first_holder: int = 0
    _deliveries: dict[int, Delivery] = field(default_factory=dict, init=False, repr=False)
    _peers: dict[int, tuple[list[int], bool]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def prompts(self) -> Int:
        """[m] ids of all prompts, ascending."""
        return self._prompts[0]

    @cached_property
    def _prompts(self) -> tuple[Int, Int]:
        """The prompts, and [n] place of each row's prompt among them."""
        prompts, of_row = np.unique(self.group_ids, return_inverse=True)
        return prompts, of_row

    @cached_property
    def _by_owner(self) -> _Places:
        order = np.lexsort((self.ids, self.owners))
        return _Places(order, self.owners[order])

    @cached_property
    def _by_id(self) -> Int:
        """[n] rows by their ids."""
        return np.argsort(self.ids)

    @cached_property
    def _source_shards(self) -> Int:
        """[n] shard of the source layout that has each row."""
        return np.searchsorted(np.array(self.source.ranks), self.holders) // self.source.ranks_per_shard

    @cached_property
    def _held_prompts(self) -> Int:
        """Prompts that shards of the source layout have: shard times the number of prompts, plus place; ascending."""
        return distinct(self._source_shards * len(self.prompts) + self._prompts[1])

    def delivery(self, rank: int) -> Delivery:
        """Rows and prompts that a rank of the target layout gets."""
        if rank not in self._deliveries:
            rows, prompts = self.deliveries((rank,))
            of_rows = self.ids[rows.places], self.group_ids[rows.places], rows.senders
            self._deliveries[rank] = Delivery(*of_rows, self.prompts[prompts.places], prompts.senders)
        return self._deliveries[rank]

    def deliveries(self, ranks: Sequence[int]) -> tuple[SentBytes, SentBytes]:
        """The rows and the prompts that some ranks of the target layout get, one rank's after another's.

        A row comes from the rank that represents it, a prompt from the lowest rank that sends samples of it.
        """
        receivers, num_prompts = np.array(ranks, dtype=np.int64), len(self.prompts)
        rows, to = self._by_owner.labeled([self.target.shard_of(rank) for rank in ranks])
        wanted, prompt_of_row = np.unique(to * num_prompts + self._prompts[1][rows], return_inverse=True)
        prompt_to, prompts = np.divmod(wanted, num_prompts)
        holders = self.holders[rows]
        lowest = np.full(len(wanted), np.iinfo(np.int64).max)
        np.minimum.at(lowest, prompt_of_row, holders)
        source = np.array([self.source.shard_of(rank) if rank in self.source else -1 for rank in ranks], dtype=np.int64)
        is_spare = self._are_spare(ranks, rows, to)
        is_here = is_spare | (self._source_shards[rows] == source[to])
        has_prompt = is_among(source[prompt_to] * num_prompts + prompts, self._held_prompts)
        has_prompt[prompt_of_row[is_spare]] = True
        to_ranks, prompt_to_ranks = receivers[to], receivers[prompt_to]
        return (
            SentBytes(rows, np.where(is_here, to_ranks, holders), to_ranks),
            SentBytes(prompts, np.where(has_prompt, prompt_to_ranks, lowest), prompt_to_ranks),
        )

    def _are_spare(self, ranks: Sequence[int], rows: Int, to: Int) -> NDArray[np.bool_]:
        """[k] whether each row came with an earlier reshard to the rank, [k] by its number, that gets it."""
        given = [(number, self.spares[rank]) for number, rank in enumerate(ranks) if rank in self.spares]
        if not given:
            return np.zeros(len(rows), dtype=np.bool_)
        numbers = np.repeat([number for number, _ in given], [len(spares) for _, spares in given])
        spares = np.concatenate([spares for _, spares in given])
        places = np.searchsorted(self.ids, spares, sorter=self._by_id)
        is_known = is_among(spares, self.ids[self._by_id])
        pairs = numbers[is_known] * len(self.ids) + self._by_id[places[is_known]]
        return is_among(to * len(self.ids) + rows, np.sort(pairs))

    def receivers(self, rank: int) -> list[int]:
        """Other ranks that may get something from a rank of the source layout, the next higher one first."""
        shards = np.unique(self.owners[self.holders == rank]).tolist()
        ranks = [peer for shard in shards for peer in self.ranks_of_shard(shard) if peer != rank]
        return sorted(ranks, key=lambda peer: (peer < rank, peer))

    def ranks_of_shard(self, shard: int) -> tuple[int, ...]:
        """The ranks that hold a shard of the target layout."""
        size = self.target.ranks_per_shard
        return self.target.ranks[shard * size : (shard + 1) * size]

    def relay(self, sender: int, receiver: int) -> int:
        """The rank from which a parcel comes: its sender, or a peer of the receiver that forwards the same bytes.

        Of peers on one host, to which the sender on another host would send the same bytes, one passes them on to the
        others; which one depends on the sender, so that all peers share that work. Where each rank of the target has a
        shard to itself, nothing is passed on.
        """
        if self.target.ranks_per_shard == 1 or self.hosts[sender] == self.hosts[receiver]:
            return sender
        peers, are_alike = self._peers_on_host(receiver)
        if not are_alike:
            parcel = self.delivery(receiver).from_rank(sender)
            peers = [peer for peer in peers if all(map(np.array_equal, parcel, self.delivery(peer).from_rank(sender)))]
        first = peers[sender % len(peers)]
        return sender if first == receiver else first

    def _peers_on_host(self, receiver: int) -> tuple[list[int], bool]:
        """The ranks with the shard of a receiver on its host, and whether all get the same from every sender."""
        if receiver not in self._peers:
            shard, host = self.ranks_of_shard(self.target.shard_of(receiver)), self.hosts[receiver]
            peers = [peer for peer in shard if self.hosts[peer] == host]
            sent = [(one.senders, one.prompt_senders) for one in map(self.delivery, peers)]
            found = peers, all(all(map(np.array_equal, sent[0], other)) for other in sent)
            self._peers.update(dict.fromkeys(peers, found))
        return self._peers[receiver]


@dataclass(frozen=True)
class _Places:
    """Rows by their labels: [n] places, and the label of each, ascending."""

    order: Int
    labels: Int

    def labeled(self, labels: Sequence[int]) -> tuple[Int, Int]:
        """The places of some labels, one after the other, and for each the number of its label among these."""
        begins, ends = (np.searchsorted(self.labels, labels, side=side) for side in ("left", "right"))
        number = np.repeat(np.arange(len(labels)), ends - begins)
        first = np.cumsum(ends - begins) - (ends - begins)
        return self.order[np.arange(len(number)) + (begins - first)[number]], number
