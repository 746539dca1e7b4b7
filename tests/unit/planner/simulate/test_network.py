"""Seconds and bytes of messages, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.simulate.clusters import network

from leaderless.planner.simulate.network import NetworkTransfer

GB = 10**9


def transfer(*messages):
    senders, receivers, sizes = (np.array(part) for part in zip(*messages, strict=True))
    return NetworkTransfer.of(senders, receivers, sizes)


def test_bytes_between_two_hosts_take_as_long_as_the_interface_needs():
    assert network(4).transfer_seconds(transfer((0, 2, 3 * GB))) == pytest.approx(3)
    assert network(4, links__network__bandwidth_gb_per_s=6).transfer_seconds(transfer((0, 2, 3 * GB))) == 0.5


def test_the_ranks_of_a_host_share_its_interface_and_two_interfaces_halve_the_time():
    both = transfer((0, 2, GB), (1, 3, GB))
    assert network(4).transfer_seconds(both) == pytest.approx(2)
    assert network(4, host__interfaces=2).transfer_seconds(both) == pytest.approx(1)


def test_directions_do_not_disturb_each_other():
    assert network(4).transfer_seconds(transfer((0, 2, GB), (2, 0, GB))) == pytest.approx(1)


def test_inside_a_host_the_faster_link_carries_and_both_levels_work_at_once():
    assert network(4).transfer_seconds(transfer((0, 1, 5 * GB))) == pytest.approx(0.5)
    assert network(4).transfer_seconds(transfer((0, 1, 5 * GB), (0, 2, GB))) == pytest.approx(1)


def test_latency_counts_the_messages_of_the_busiest_rank():
    slow = network(6, links__network__latency_us=1000, links__host__latency_us=10)
    fan_in = transfer(*((rank, 4, 1) for rank in (0, 1, 2)))
    assert slow.latency_seconds(fan_in) == pytest.approx(3e-3)
    assert slow.transfer_seconds(fan_in) == pytest.approx(3e-3 + 3 / GB)
    assert slow.latency_seconds(transfer((0, 1, 1))) == pytest.approx(1e-5)
    for nothing in (transfer((1, 1, GB)), transfer((0, 1, 0))):
        assert slow.transfer_seconds(nothing) == slow.latency_seconds(nothing) == 0


def test_interfaces_count_what_leaves_the_host_only():
    out, into = network(4).interface_bytes(transfer((0, 1, 7), (0, 2, 5), (3, 0, 4)))
    assert out.tolist() == [5, 4]
    assert into.tolist() == [4, 5]


def test_a_gather_of_weights_takes_what_the_narrowest_level_lets_through():
    four = network(4, host__interfaces=2)
    assert four.gather_seconds(4 * GB, np.arange(1)) == 0
    assert four.gather_seconds(4 * GB, np.arange(2)) == pytest.approx(2 / 10)  # half of it, inside the host
    assert four.gather_seconds(4 * GB, np.arange(4)) == pytest.approx(3 / 2)  # three quarters, over two interfaces
    assert four.gather_seconds(4 * GB, np.array([0, 2])) == pytest.approx(2 / 1)  # half, over one interface each
    hops = network(4, links__network__latency_us=100)
    assert hops.gather_seconds(0, np.arange(4)) == pytest.approx(2 * 100e-6)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 10**9)), min_size=1))
def test_all_that_is_sent_is_received_and_more_never_takes_less(messages):
    moved, links = transfer(*messages), network(8)
    expected = sum(size for sender, receiver, size in messages if sender != receiver)
    assert moved.sent(8).sum() == moved.received(8).sum() == expected
    out, into = links.interface_bytes(moved)
    assert out.sum() == into.sum() == sum(size for a, b, size in messages if a // 2 != b // 2)
    more = transfer(*messages, (0, 7, 1000))
    assert links.transfer_seconds(more) >= links.transfer_seconds(moved)
