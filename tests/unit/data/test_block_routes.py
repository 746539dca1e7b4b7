"""Routes that many ranks agree on in blocks, all played by one process."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaderless.data.buffer.block_exchange import ExchangeLeg, Result, Talk
from leaderless.data.buffer.block_routes import HELD, SPARE, WANTED, Meeting, agree
from leaderless.planner import Layout, Reshard
from leaderless.planner.assign.balance import EarlierWork, Int, assign, by_part
from leaderless.planner.assign.blocks import (
    LATE_LEGS,
    NUM_LEGS,
    ROUNDS_PER_LEG,
    SELECTION_LEGS,
    BlockUnits,
    Mesh,
    Shards,
    assign_in_blocks,
    num_messages,
)
from leaderless.planner.assign.routes import RowRoutes


@dataclass
class Heard:
    """What the busiest place has sent and received: messages, and numbers."""

    messages: int = 0
    numbers: int = 0
    legs: int = 0
    _by_place: dict[int, list[int]] = field(default_factory=dict)

    def note(self, legs: list[ExchangeLeg], received: list[dict[int, Int]]) -> None:
        self.legs += 1
        for place, (leg, come) in enumerate(zip(legs, received, strict=True)):
            mine = self._by_place.setdefault(place, [0, 0])
            mine[0] += len(leg.sent)
            mine[1] += sum(map(len, leg.sent.values())) + sum(map(len, come.values()))
        self.messages = max(one[0] for one in self._by_place.values())
        self.numbers = max(one[1] for one in self._by_place.values())


def play(talks: list[Talk[Result]], heard: Heard | None = None) -> list[Result]:
    """Hold the conversation of all places."""
    results: list[Result | None] = [None] * len(talks)
    legs = [next(talk) for talk in talks]
    while True:
        for place, leg in enumerate(legs):
            assert all(place in legs[sender].sent for sender in leg.senders), "who is waited for sends"
            assert all(place in legs[receiver].senders for receiver in leg.sent), "what is sent is waited for"
        received = [{sender: legs[sender].sent[place] for sender in leg.senders} for place, leg in enumerate(legs)]
        if heard is not None:
            heard.note(legs, received)
        following: list[ExchangeLeg] = []
        for place, (talk, numbers) in enumerate(zip(talks, received, strict=True)):
            try:
                following.append(talk.send(numbers))
            except StopIteration as end:
                results[place] = end.value
        if not following:
            return [one for one in results if one is not None]
        assert len(following) == len(talks), "all places stop together"
        legs = following


@dataclass(frozen=True)
class Edge:
    """Rows of an edge: [n] ids, groups, ranks that represent them, costs; and rows that ranks have got before."""

    action: Reshard
    ids: Int
    groups: Int
    holders: Int
    costs: Int
    spares: dict[int, Int]
    hosts: dict[int, int]

    @property
    def meeting(self) -> Meeting:
        return Meeting(self.action, self.action.ranks, self.hosts)

    def facts(self, rank: int, wanted: Int | None = None) -> Int:
        """What a rank says."""
        target = self.action.target_layout
        shard = target.shard_of(rank) if rank in target else -1
        mine, before = np.flatnonzero(self.holders == rank), np.isin(self.ids, self.spares.get(rank, []))
        wanted = np.flatnonzero(wanted == shard) if wanted is not None and target.represents(rank) else mine[:0]
        kinds = (HELD, mine), (SPARE, np.flatnonzero(before)), (WANTED, wanted)
        return np.array(
            [
                [kind, self.ids[row], self.groups[row], rank, shard, self.costs[row] * (kind == HELD)]
                for kind, rows in kinds
                for row in rows.tolist()
            ],
            dtype=np.int64,
        ).reshape(-1, 6)

    def play(
        self, wanted: Int | None = None, earlier: EarlierWork | None = None, heard: Heard | None = None
    ) -> list[RowRoutes]:
        """The routes that each rank finds."""
        copies = [earlier and earlier._replace(loads=earlier.loads.copy()) for _ in self.action.ranks]
        meeting = self.meeting
        talks = [
            agree(meeting, rank, self.facts(rank, wanted if rank in self.action.target_layout else None), copy)
            for rank, copy in zip(self.action.ranks, copies, strict=True)
        ]
        return play(talks, heard)

    def owners(self, found: list[RowRoutes]) -> Int:
        """[n] shard of each row, as its holder has heard."""
        by_rank = dict(zip(self.action.ranks, found, strict=True))
        return np.array(
            [
                int(by_rank[holder].owners[by_rank[holder].ids == row][0])
                for row, holder in zip(self.ids.tolist(), self.holders.tolist(), strict=True)
            ],
            dtype=np.int64,
        )

    def whole(self, owners: Int) -> RowRoutes:
        """The routes of a rank that knows all rows."""
        source, target = self.action.source_layout, self.action.target_layout
        hosts = {rank: self.hosts.get(rank, -1 - rank) for rank in self.action.ranks}
        return RowRoutes(self.ids, self.groups, self.holders, owners, source, target, hosts, self.spares)


@st.composite
def edges(draw: st.DrawFn) -> Edge:
    """Rows of groups that may be split between ranks, on up to 24 ranks."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 24))
    pools = draw(st.sampled_from(["same", "apart", "overlapping"]))
    tp = draw(st.sampled_from([1, 1, 2, 4]))
    ranks = 3 + 2 * np.arange(max(size // tp, 1) * tp)
    cut = {"same": 0, "apart": len(ranks), "overlapping": len(ranks) // 2}[pools]
    source = Layout(tuple(ranks.tolist()), len(ranks) // tp, tp=tp)
    into = cut + np.arange(len(ranks))
    target_tp = draw(st.sampled_from([1, tp]))
    target = Layout(tuple((3 + 2 * into).tolist()), len(ranks) // target_tp, tp=target_tp)
    count, siblings = draw(st.integers(0, 90)), draw(st.sampled_from([1, 4]))
    keep_groups, num_updates = draw(st.booleans()), draw(st.sampled_from([1, 3]))
    action = Reshard("rollout", "rollout", ("tokens",), source, target, keep_groups, num_updates=num_updates)
    groups = np.arange(count, dtype=np.int64) // siblings * 1000 + 7
    shards = np.sort(generator.integers(0, source.dp, count))
    if draw(st.booleans()):
        shards = generator.permutation(shards)
    part = generator.integers(0, tp, count) * (tp > 1)
    holders = np.array(source.ranks)[shards * tp + part].astype(np.int64)
    spares: dict[int, Int] = {}
    if draw(st.booleans()):
        before = generator.integers(0, len(target.ranks), count)
        spares = {rank: np.arange(count)[before == place] + 5 for place, rank in enumerate(target.ranks)}
        spares = {rank: rows for rank, rows in spares.items() if len(rows)}
    costs = np.rint(100 * np.exp(generator.standard_normal(count))).astype(np.int64) + 1
    hosts = {rank: rank // 8 for rank in action.ranks}
    return Edge(action, np.arange(count) + 5, groups, holders, costs, spares, hosts)


def check_same_parcels(edge: Edge, found: list[RowRoutes]) -> None:
    """Every rank sends, receives and passes on what it would if it knew all rows."""
    whole = edge.whole(edge.owners(found))
    for rank, mine in zip(edge.action.ranks, found, strict=True):
        assert mine.first_holder == (edge.holders.min() if len(edge.ids) else edge.action.source_layout.ranks[0])
        peers = whole.receivers(rank)
        assert mine.receivers(rank) == peers
        if rank in edge.action.target_layout:
            for one, other in zip(mine.delivery(rank).tables, whole.delivery(rank).tables, strict=True):
                assert one.tolist() == other.tolist()
            assert mine.delivery(rank).senders.tolist() == whole.delivery(rank).senders.tolist()
            assert mine.delivery(rank).prompt_senders.tolist() == whole.delivery(rank).prompt_senders.tolist()
            shard = edge.action.target_layout.shard(rank)
            for sender in mine.delivery(rank).all_senders:
                assert [mine.relay(sender, peer) for peer in shard if sender != peer] == [
                    whole.relay(sender, peer) for peer in shard if sender != peer
                ]
        for receiver in peers:
            assert mine.relay(rank, receiver) == whole.relay(rank, receiver)
            for table in (0, 1):
                here, there = mine.delivery(receiver), whole.delivery(receiver)
                sent = here.tables[table][here.from_rank(rank)[table]].tolist()
                assert sent == there.tables[table][there.from_rank(rank)[table]].tolist()


@given(edges())
def test_ranks_that_know_few_rows_send_and_receive_as_if_they_knew_all(edge: Edge) -> None:
    """Blocks divide rows as one process does that plays them all."""
    found = edge.play()
    check_same_parcels(edge, found)
    owners, meeting = edge.owners(found), edge.meeting
    target, holding = edge.action.target_layout, np.full(len(edge.ids), -1, dtype=np.int64)
    for rank in sorted(edge.spares, reverse=True):
        holding[np.isin(edge.ids, edge.spares[rank])] = target.shard_of(rank)
    for row, holder in enumerate(edge.holders.tolist()):
        if holder in target:
            holding[row] = target.shard_of(holder)
    names = edge.groups if edge.action.keep_groups else edge.ids
    order = np.lexsort((edge.ids, edge.holders))
    units, first, of_row = np.unique(names[order], return_index=True, return_inverse=True)
    costs = np.bincount(of_row, weights=edge.costs[order], minlength=len(units)).astype(np.int64)
    known, whole = np.unique(edge.groups), BlockUnits(units, costs, holding[order][first])
    updates = np.searchsorted(known, edge.groups) * edge.action.num_updates // max(1, len(known))
    parts = updates[order][first]
    expected = by_part(parts, lambda chosen: assign_in_blocks(whole.select(chosen), meeting.shards))
    assert owners[order].tolist() == expected[of_row].tolist()
    if edge.action.keep_groups:
        assert all(len(set(owners[edge.groups == group].tolist())) == 1 for group in edge.groups.tolist())


@given(edges(), st.data())
def test_rows_that_are_wanted_go_to_who_wants_them(edge: Edge, data: st.DataObject) -> None:
    dp = edge.action.target_layout.dp
    wanted = np.array(data.draw(st.lists(st.integers(0, dp - 1), min_size=len(edge.ids), max_size=len(edge.ids))))
    found = edge.play(wanted.astype(np.int64))
    assert edge.owners(found).tolist() == wanted.tolist()
    check_same_parcels(edge, found)


def even_edge(num_ranks: int, per_rank: int, *, keep_groups: bool = False, siblings: int = 1) -> Edge:
    """Rows on the first half of the ranks, on their way to the second."""
    half, generator = num_ranks // 2, np.random.default_rng(0)
    source, target = Layout(tuple(range(half)), half), Layout(tuple(range(half, num_ranks)), half)
    action = Reshard("rollout", "rollout", ("tokens",), source, target, keep_groups=keep_groups)
    count = per_rank * half
    costs = np.clip(np.rint(1800 * np.exp(0.8 * generator.standard_normal(count))), 1, 7168).astype(np.int64)
    ids = np.arange(count, dtype=np.int64)
    return Edge(action, ids, ids // siblings, ids * half // count, costs, {}, {})


def test_all_ranks_name_a_row_that_two_hold_or_that_nobody_wants() -> None:
    edge = even_edge(20, 4)
    edge.ids[[3, 30]] = edge.groups[[3, 30]] = 11
    with pytest.raises(RuntimeError, match=r"row 11 is held by two shards"):
        edge.play()
    edge = even_edge(20, 4)
    owners = np.zeros(40, dtype=np.int64)
    owners[7] = -5  # no shard
    with pytest.raises(RuntimeError, match="40 rows are held, but 39 are wanted"):
        edge.play(owners)


def test_work_of_earlier_windows_counts() -> None:
    edge = even_edge(32, 16)
    loads = np.zeros(16, dtype=np.int64)
    loads[:8] = edge.costs.sum() // 16
    owners = edge.owners(edge.play(earlier=EarlierWork(loads[None], len(edge.ids))))
    work = loads + np.bincount(owners, weights=edge.costs, minlength=16).astype(np.int64)
    assert work.max() <= 1.02 * work.mean()
    loads[3] = 10 * edge.costs.sum()
    owners = edge.owners(edge.play(earlier=EarlierWork(loads[None], len(edge.ids))))
    assert 3 not in owners


def test_the_work_of_each_update_is_even_in_windows_too() -> None:
    edge = even_edge(32, 16)
    edge = replace(edge, action=replace(edge.action, num_updates=4))
    num_groups = int(edge.groups.max()) + 1
    part = edge.groups * 4 // num_groups
    loads = np.zeros((4, 16), dtype=np.int64)
    loads[1, :8] = edge.costs[part == 1].sum() // 16
    owners = edge.owners(edge.play(earlier=EarlierWork(loads, num_groups)))
    for number in range(4):
        mine = part == number
        work = loads[number] + np.bincount(owners[mine], weights=edge.costs[mine], minlength=16).astype(np.int64)
        assert work.max() <= 1.1 * work.mean()


@pytest.mark.parametrize("num_ranks", [144, pytest.param(1024, marks=pytest.mark.thorough)])
def test_messages_and_numbers_of_a_rank_grow_with_the_root_of_the_ranks(num_ranks: int) -> None:
    small, large = Heard(), Heard()
    even_edge(64, 8).play(heard=small)
    even_edge(num_ranks, 8).play(heard=large)
    growth = 1.125 * math.sqrt(num_ranks / 64)  # with 1,024 ranks, 31 of 32 are sent to, and with 64, 7 of 8
    assert large.messages <= growth * small.messages
    assert large.numbers <= growth * small.numbers
    assert small.legs == large.legs == NUM_LEGS
    assert ROUNDS_PER_LEG * large.messages <= num_messages(num_ranks)
    late, divided = Heard(), Heard()
    edge = even_edge(64, 8)
    edge.play(edge.ids % 32, heard=late)
    replace(edge, action=replace(edge.action, num_updates=4)).play(heard=divided)
    assert (late.legs, divided.legs) == (LATE_LEGS, NUM_LEGS + SELECTION_LEGS)


@given(st.integers(1, 3000), st.data())
def test_a_mesh_has_blocks_of_one_size_and_everyone_sends_to_few(num_ranks: int, data: st.DataObject) -> None:
    mesh = Mesh(num_ranks)
    sizes = np.diff(mesh.begins)
    assert sizes.max() - sizes.min() <= 1
    place = data.draw(st.integers(0, num_ranks - 1))
    below, above = mesh.below(place).tolist(), mesh.above(place).tolist()
    assert len(below) <= 2 * mesh.num_blocks
    assert len(above) == mesh.num_blocks
    assert all(place in mesh.above(one) for one in below)
    assert all(place in mesh.below(one) for one in above)


def evenness(costs: Int, owners: Int, num_shards: int) -> float:
    return float(np.bincount(owners, weights=costs, minlength=num_shards).max() * num_shards / costs.sum())


@pytest.mark.parametrize("num_ranks", [8, 16, 36, 64])
@pytest.mark.parametrize("kind", ["pools", "even", "uneven"])
@pytest.mark.parametrize("siblings", [1, 4])
def test_blocks_divide_as_evenly_as_all_at_once(num_ranks: int, kind: str, siblings: int) -> None:
    first = np.arange(num_ranks // 2 * (kind == "pools"), num_ranks)
    dp, count = len(first), num_ranks * 8
    generator = np.random.default_rng(num_ranks)
    costs = np.clip(np.rint(1800 * np.exp(0.8 * generator.standard_normal((count, siblings)))), 1, 7168).sum(axis=1)
    costs = costs.astype(np.int64)
    holders = np.arange(count) * dp // count
    if kind == "pools":
        holders = np.full(count, -1)
    elif kind == "uneven":
        weights = 1 + np.arange(dp) / dp
        holders = np.searchsorted(np.cumsum(weights) / weights.sum(), (np.arange(count) + 0.5) / count)
    units = BlockUnits(np.arange(count) * 31, costs, holders)
    in_blocks = assign_in_blocks(units, Shards.of(Mesh(num_ranks), first))
    at_once = assign(costs, units.names, holders, dp)
    assert evenness(costs, in_blocks, dp) <= 1.02 * evenness(costs, at_once, dp)
    stay = [(owners == holders).mean() for owners in (in_blocks, at_once)]
    assert stay[0] >= stay[1] - 0.1, "rows stay where they are, as they do then"
