"""Which rank sends which rows of a reshard to which other rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leaderless.planner import Layout
from leaderless.planner.assign.balance import Int
from leaderless.planner.assign.routes import RowRoutes


def ints(values: list[int]) -> Int:
    return np.array(values, dtype=np.int64)


def routes(
    groups: list[int],
    holders: list[int],
    owners: list[int],
    source: Layout,
    target: Layout,
    hosts: dict[int, int] | None = None,
    spares: dict[int, Int] | None = None,
) -> RowRoutes:
    ranks = {*source.ranks, *target.ranks}
    ids = ints(list(range(100, 100 + len(groups))))
    hosts = hosts or dict.fromkeys(ranks, 0)
    return RowRoutes(ids, ints(groups), ints(holders), ints(owners), source, target, hosts, spares or {})


def test_a_prompt_comes_once_from_the_lowest_of_who_send_its_samples() -> None:
    apart = routes([7, 7, 7, 8], [0, 1, 1, 1], [0, 0, 1, 0], Layout((0, 1), 2), Layout((2, 3), 2))
    first, second = apart.delivery(2), apart.delivery(3)
    assert (first.ids.tolist(), first.senders.tolist()) == ([100, 101, 103], [0, 1, 1])
    assert (first.prompts.tolist(), first.prompt_senders.tolist()) == ([7, 8], [0, 1])
    assert (second.prompts.tolist(), second.prompt_senders.tolist()) == ([7], [1])


def test_what_a_rank_has_is_not_sent_to_it_as_its_peer_s_either() -> None:
    doubled = Layout((0, 1), 1, tp=2)  # both have all rows, and each represents half of them
    same = routes([1, 1, 2, 2], [0, 0, 1, 1], [0, 1, 0, 1], doubled, Layout((0, 1), 2))
    for rank in (0, 1):
        delivery = same.delivery(rank)
        assert delivery.all_senders == [rank]


def test_rows_that_came_before_are_not_sent_again() -> None:
    known = {2: ints([101])}
    late = routes([5, 5, 6], [0, 0, 0], [0, 0, 0], Layout((0,), 1), Layout((2,), 1), spares=known)
    delivery = late.delivery(2)
    assert delivery.senders.tolist() == [0, 2, 0]
    assert delivery.prompt_senders.tolist() == [2, 0]


def test_peers_on_one_host_get_one_copy_from_another_host_and_take_turns_in_passing_it_on() -> None:
    source, target = Layout((0, 1), 2), Layout((2, 3, 4, 5), 1, tp=4)
    far = routes([1, 2], [0, 1], [0, 0], source, target, hosts={0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2})
    for sender, first, second in ((0, 2, 4), (1, 3, 5)):
        origins = {rank: far.relay(sender, rank) for rank in target.ranks}
        others = {2: 3, 3: 2, 4: 5, 5: 4}
        assert origins == {first: sender, second: sender, others[first]: first, others[second]: second}
    near = routes([1, 2], [0, 1], [0, 0], source, target)
    assert near.relay(0, 3) == 0


def check_deliveries(edge: RowRoutes) -> None:
    """What all ranks get, computed at once, is what a loop over the rows finds for each."""
    rows, prompts = edge.deliveries(edge.target.ranks)
    columns = zip(edge.ids.tolist(), edge.group_ids.tolist(), edge.holders.tolist(), edge.owners.tolist(), strict=True)
    known = [(row, group, holder, edge.source.shard_of(holder), owner) for row, group, holder, owner in sorted(columns)]
    expected_rows, expected_prompts = [], []
    for rank in edge.target.ranks:
        own, spares = edge.source.shard_of(rank) if rank in edge.source else None, edge.spares.get(rank, ints([]))
        mine = [one for one in known if one[-1] == edge.target.shard_of(rank)]
        expected_rows += [
            (row, rank if shard == own or row in spares else holder, rank) for row, _, holder, shard, _ in mine
        ]
        here = {group for _, group, _, shard, _ in known if shard == own}
        here |= {group for row, group, *_ in mine if row in spares}
        for wanted in sorted({group for _, group, *_ in mine}):
            lowest = min(holder for _, group, holder, *_ in mine if group == wanted)
            expected_prompts.append((wanted, rank if wanted in here else lowest, rank))
    for ids, sent, expected in ((edge.ids, rows, expected_rows), (edge.prompts, prompts, expected_prompts)):
        found = zip(ids[sent.places].tolist(), sent.senders.tolist(), sent.receivers.tolist(), strict=True)
        assert list(found) == expected


def test_peers_that_lack_different_rows_get_them_from_the_sender_itself() -> None:
    source, target, hosts = Layout((0,), 1), Layout((2, 3), 1, tp=2), {0: 0, 2: 1, 3: 1}
    known = {3: ints([100])}
    apart = routes([1, 2], [0, 0], [0, 0], source, target, hosts, known)
    assert [apart.relay(0, rank) for rank in target.ranks] == [0, 0]
    alike = routes([1, 2], [0, 0], [0, 0], source, target, hosts, known | {2: ints([100])})
    assert {alike.relay(0, rank) for rank in target.ranks} == {0, 2}


@given(st.data())
def test_every_rank_gets_every_row_of_its_shard_once(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([Layout((0, 1, 2), 3), Layout((0, 1, 2, 3), 2, tp=2), Layout((1,), 1)]))
    target = data.draw(
        st.sampled_from([Layout((0, 1, 2, 3), 4), Layout((2, 3, 4, 5), 2, tp=2), Layout((4, 5), 1, tp=2)])
    )
    count = data.draw(st.integers(0, 20))
    holders = data.draw(st.lists(st.sampled_from(source.ranks), min_size=count, max_size=count))
    owners = data.draw(st.lists(st.integers(0, target.dp - 1), min_size=count, max_size=count))
    groups = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    hosts = {rank: data.draw(st.integers(0, 2)) for rank in range(6)}
    edge = routes(groups, holders, owners, source, target, hosts)
    known = {rank: ints(data.draw(st.lists(st.integers(98, 122), max_size=4, unique=True))) for rank in target.ranks}
    any_order = ints(data.draw(st.permutations(edge.ids.tolist())))
    check_deliveries(replace(edge, ids=any_order, spares=known))
    for rank in target.ranks:
        delivery = edge.delivery(rank)
        mine = np.flatnonzero(ints(owners) == target.shard_of(rank))
        assert delivery.ids.tolist() == (100 + mine).tolist()
        assert delivery.prompts.tolist() == sorted({groups[row] for row in mine})
        assert set(delivery.senders.tolist()) <= {rank, *(holders[row] for row in mine)}
        for sender in delivery.all_senders:
            if sender == rank:
                continue
            assert rank in edge.receivers(sender)
            origin = edge.relay(sender, rank)
            if origin != sender:  # the rank that passes it on got it from the sender itself, on the same host
                assert edge.relay(sender, origin) == sender
                assert hosts[origin] == hosts[rank] != hosts[sender]
