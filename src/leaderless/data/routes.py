"""Where every row of a reshard is and where it goes; all its ranks compute the same result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from leaderless.data.balance import Int
from leaderless.planner import Layout

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
        """What one rank sends."""
        return np.flatnonzero(self.senders == sender), np.flatnonzero(self.prompt_senders == sender)


@dataclass(frozen=True)
class Routes:
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

    @cached_property
    def _by_owner(self) -> _Places:
        return _Places.of(self.owners)

    @cached_property
    def _source_shards(self) -> Int:
        """[n] shard of the source layout that has each row."""
        return np.searchsorted(np.array(self.source.ranks), self.holders) // self.source.ranks_per_shard

    @cached_property
    def _by_source_shard(self) -> _Places:
        return _Places.of(self._source_shards)

    def delivery(self, rank: int) -> Delivery:
        """What a rank of the target layout gets.

        A row comes from the rank that represents it, a prompt from the lowest rank that sends samples of it.
        """
        if rank not in self._deliveries:
            self._deliveries[rank] = self._deliver(rank)
        return self._deliveries[rank]

    def _deliver(self, rank: int) -> Delivery:
        rows = self._by_owner[self.target.shard_of(rank)]
        rows = rows[np.argsort(self.ids[rows])]
        ids, group_ids, holders = self.ids[rows], self.group_ids[rows], self.holders[rows]
        prompts, inverse = np.unique(group_ids, return_inverse=True)
        lowest = np.full(len(prompts), np.iinfo(np.int64).max)
        np.minimum.at(lowest, inverse, holders)
        is_here = np.zeros(len(rows), dtype=np.bool_)
        has_prompt = np.zeros(len(prompts), dtype=np.bool_)
        if rank in self.source:
            is_here |= self._source_shards[rows] == self.source.shard_of(rank)
            has_prompt |= np.isin(prompts, self.group_ids[self._by_source_shard[self.source.shard_of(rank)]])
        if rank in self.spares:
            is_spare = np.isin(ids, self.spares[rank])
            is_here |= is_spare
            has_prompt[inverse[is_spare]] = True
        return Delivery(ids, group_ids, np.where(is_here, rank, holders), prompts, np.where(has_prompt, rank, lowest))

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
        parcel = self.delivery(receiver).from_rank(sender)
        peers = [
            peer
            for peer in self.ranks_of_shard(self.target.shard_of(receiver))
            if self.hosts[peer] == self.hosts[receiver]
            and all(map(np.array_equal, parcel, self.delivery(peer).from_rank(sender)))
        ]
        first = peers[sender % len(peers)]
        return sender if first == receiver else first


@dataclass(frozen=True)
class _Places:
    """Where each label stands, ascending: [n] places by label, and the label of each."""

    order: Int
    labels: Int

    @classmethod
    def of(cls, labels: Int) -> _Places:
        order = np.argsort(labels, kind="stable")
        return cls(order, labels[order])

    def __getitem__(self, label: int) -> Int:
        begin, end = np.searchsorted(self.labels, [label, label + 1]).tolist()
        return self.order[begin:end]
