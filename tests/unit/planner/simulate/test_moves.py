"""The cost of one transition: directly from rank to rank, and through a controller."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.simulated.controllers import Controller, controller_cost, separate_bytes
from benchmarks.simulated.prediction import errors_of, predict
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.simulate.clusters import cluster, equal_rows, network, pools

from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer.reshard import agree_at_once, schemas_to_json
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.differences import BITS, TRAILER, difference
from leaderless.planner import Layout, Reshard, SyncWeights
from leaderless.planner.memory.limits import DEVICE_WEIGHT_BUCKET_BYTES, PIECE_BYTES, ROUNDS_AHEAD
from leaderless.planner.simulate.rows import SimulatedRoutes, SimulatedRows, owners_of, sending_ranks
from leaderless.planner.simulate.transfers import (
    FACT_BYTES,
    PLANNING_BYTES_PER_ROW,
    SCHEMA_BYTES,
    Cost,
    difference_share,
    parcels_of,
    peer_cost,
    put_cost,
    selection_cost,
    updates_cost,
    weights_cost,
)

ONE_A_HOST = {"host__devices": 1}
ROW_BYTES = 100 * 8
"""Bytes of a row of 100 tokens."""
SENT_BYTES = ROW_BYTES + 4
"""Bytes sent for a row, with its length."""
HELD_BYTES = ROW_BYTES + 8 + 16
"""Bytes of a row in memory, with its length and two ids."""


def between_pools(world_size, rows, *columns):
    """Rows distributed evenly over the first half of the ranks, on their way to the second."""
    action = pools(world_size, *columns)
    holders = np.arange(len(rows)) * (world_size // 2) // len(rows)
    owners = owners_of(action, rows, holders, {})
    return SimulatedRoutes(rows, holders, owners, action.source_layout, action.target_layout, is_agreed=False)


def moved_bytes(routes, columns, links):
    """Bytes sent from rank to rank, for lengths and values."""
    moved: dict[tuple[int, int], int] = {}
    for part in parcels_of(routes, columns, links).transfers:
        for sender, receiver, size in zip(part.senders.tolist(), part.receivers.tolist(), part.sizes, strict=True):
            moved[sender, receiver] = moved.get((sender, receiver), 0) + int(size)
    return moved


def seconds_of(routes, world_size, **constants):
    ranks = np.arange(world_size)
    return peer_cost(routes, ["tokens"], ranks, network(world_size, **constants)).seconds


def test_rows_between_two_hosts_take_their_bytes_over_the_interface():
    routes = between_pools(2, equal_rows(1000), "tokens")
    slow = {"links__network__bandwidth_gb_per_s": 1e-3}
    carried = 1000 * SENT_BYTES / 1e6
    assert seconds_of(routes, 2, **ONE_A_HOST, **slow) == pytest.approx(carried, rel=1e-3)


def test_every_part_of_a_transition_adds_its_own_time():
    routes, base = between_pools(4, equal_rows(1000), "tokens"), ONE_A_HOST
    before = seconds_of(routes, 4, **base)
    added = {
        "coordinator__assignment_us_per_row": (10.0, 1000 * 10e-6),
        "coordinator__hop_latency_us": (
            100.0,
            (3 * 3 + 2 * 2) * 100e-6,
        ),  # a gather, two broadcasts
        "links__device__latency_us": (50.0, 2 * 50e-6),
        "links__network__latency_us": (100.0, 2 * 2 * 100e-6),  # lengths and values, to two receivers
    }
    for name, (value, seconds) in added.items():
        assert seconds_of(routes, 4, **base, **{name: value}) - before == pytest.approx(seconds, rel=1e-6), name


def test_owners_that_are_agreed_are_not_computed_again():
    rows = equal_rows(100)
    new = between_pools(4, rows, "tokens")
    agreed = replace(new, is_agreed=True)
    costly = {"coordinator__assignment_us_per_row": 1e6}
    assert seconds_of(new, 4, **costly) - seconds_of(agreed, 4, **costly) == pytest.approx(100, rel=0.01)


def test_what_ranks_have_got_before_is_told_by_ids():
    routes, slow = between_pools(4, equal_rows(1000), "tokens"), {"coordinator__hop_bandwidth_gb_per_s": 1e-3}
    agreement = (2 * 8 * 4 + 4 * 500 * 8) / 1e6
    late = replace(routes, is_agreed=True)
    assert seconds_of(late, 4, **slow) - seconds_of(routes, 4, **slow) == pytest.approx(agreement)
    there = peer_cost(routes, ["tokens"], np.arange(4), network(4, **ONE_A_HOST)).interface_bytes
    spared = replace(routes, spares={2: np.flatnonzero(routes.owners == 0)})
    here = peer_cost(spared, ["tokens"], np.arange(4), network(4, **ONE_A_HOST)).interface_bytes
    # The last rank's interface is the busiest now as before, and it receives 500 rows.
    assert here - there == 2 * (2 * 8 * 4 + 4 * 500 * 8)
    assert moved_bytes(spared, ["tokens"], network(4)).keys() == {(0, 3), (1, 3)}


def test_a_node_that_sends_compares_first():
    slow = {"coordinator__hop_latency_us": 100.0, "coordinator__hop_bandwidth_gb_per_s": 1e-3}
    cost = put_cost(np.arange(4), network(4, **ONE_A_HOST, **slow))
    assert cost.seconds == pytest.approx(3 * 3 * 100e-6 + 4 * (16 + 24) / 1e6)
    assert cost.interface_bytes == 2 * 4 * (16 + 24)


def test_a_prompt_travels_once_to_each_shard_and_from_the_lowest_sender():
    rows = equal_rows(2, siblings=2, prompt=50, response=1)
    holders = np.array([1, 0, 0, 0])
    routes = SimulatedRoutes(
        rows, holders, np.array([0, 0, 0, 1]), Layout((0, 1), 2), Layout((2, 3), 2), is_agreed=False
    )
    row, prompt = 4 + 8, 4 + 50 * 8
    sent = moved_bytes(routes, ["tokens", "prompt_tokens"], network(4))
    assert sent == {(1, 2): row, (0, 2): 2 * row + 2 * prompt, (0, 3): row + prompt}


def test_a_prompt_stays_away_where_one_of_its_samples_is():
    rows = equal_rows(2, siblings=2, prompt=50, response=1)
    both = Layout((0, 1), 2)
    routes = SimulatedRoutes(rows, np.array([0, 0, 0, 1]), np.array([0, 1, 1, 1]), both, both, is_agreed=False)
    # The second rank has a sample of the second prompt, but none of the first.
    assert moved_bytes(routes, ["tokens", "prompt_tokens"], network(2)) == {(0, 1): 2 * (4 + 8) + 4 + 50 * 8}


def test_updates_begin_with_groups_that_ranks_find_from_the_ids_of_their_own():
    slow = {"coordinator__hop_latency_us": 100.0, "coordinator__hop_bandwidth_gb_per_s": 1e-3}
    rows = equal_rows(6, siblings=4)
    holders = np.repeat([0, 1], [12, 12])
    holders[12] = 0  # of 3 groups and one of another, and of 3
    few = selection_cost(rows, holders, np.arange(4), network(4, **ONE_A_HOST, **slow))
    assert few.seconds == pytest.approx(3 * 3 * 100e-6 + 4 * (16 + 4 * 8) / 1e6)
    many = selection_cost(rows, holders, np.arange(1024), network(1024, **ONE_A_HOST, **slow))
    messages = 8 * 2 * 32
    assert many.seconds == pytest.approx(messages * 100e-6 + (4 * 4 * 8 + 8 * messages) / 1e6)
    for count, hops, selected in ((4, 2 * 3, few), (1024, 2 * 32, many)):
        ranks, links = np.arange(count), network(count, **ONE_A_HOST, **slow)
        once = updates_cost(rows, holders, 1, ranks, links).seconds
        assert once == pytest.approx(3 * hops * (100e-6 + 8 / 1e6)), "three sums"
        assert updates_cost(rows, holders, 4, ranks, links).seconds == pytest.approx(4 * once + selected.seconds)


def test_rows_without_columns_are_agreed_on_and_send_nothing():
    assert moved_bytes(between_pools(4, equal_rows(10)), [], network(4)) == {}


def test_all_ranks_of_a_shard_get_its_rows_and_share_the_sending():
    rows = equal_rows(4)
    source, target = Layout((0, 1), 1, tp=2), Layout((2, 3), 1, tp=2)
    holders = sending_ranks(np.zeros(4, dtype=np.int64), source)
    assert holders.tolist() == [0, 0, 1, 1]
    routes = SimulatedRoutes(rows, holders, np.zeros(4, dtype=np.int64), source, target, is_agreed=False)
    apart, together = (moved_bytes(routes, ["tokens"], network(4, host__devices=size)) for size in (1, 2))
    half = 2 * SENT_BYTES
    assert apart == {(0, 2): half, (0, 3): half, (1, 2): half, (1, 3): half}
    # Peers on one host take turns in getting a copy from another host, and pass it on.
    assert together == {(0, 2): half, (2, 3): half, (1, 3): half, (3, 2): half}


def test_what_is_passed_on_crosses_once_and_waits_for_the_first_leg():
    rows, source, target = equal_rows(4), Layout((0, 1), 2), Layout((2, 3), 1, tp=2)
    routes = SimulatedRoutes(rows, np.array([0, 0, 1, 1]), np.zeros(4, dtype=np.int64), source, target, is_agreed=False)
    alone = replace(routes, target=Layout((2,), 1))
    late = {"host__devices": 2, "links__network__latency_us": 1000.0}
    before, after = (seconds_of(part, 4, **late) for part in (alone, routes))
    assert after - before > 1e-3, "another leg"
    crossing = [parcels_of(part, ["tokens"], network(4, host__devices=2)) for part in (alone, routes)]
    assert [part.interface_bytes(network(4, host__devices=2)) for part in crossing] == [4 * SENT_BYTES] * 2


def test_a_parcel_is_what_one_rank_sends_whoever_passes_it_on():
    rows, source, target = equal_rows(4), Layout((0, 1, 2, 3), 4), Layout((4, 5), 1, tp=2)
    routes = SimulatedRoutes(rows, np.array([0, 1, 2, 3]), np.zeros(4, dtype=np.int64), source, target, is_agreed=False)
    parcels = parcels_of(routes, ["tokens"], network(6, host__devices=4))
    assert parcels.values.sizes.max() == 2 * ROW_BYTES, "each peer passes on what two ranks send"
    assert parcels.largest_bytes == ROW_BYTES


def test_what_ranks_hold_as_replicas_does_not_travel():
    rows, source, target = equal_rows(8), Layout((0, 1), 1, tp=2), Layout((0, 1), 2)
    holders = sending_ranks(np.zeros(8, dtype=np.int64), source)
    routes = SimulatedRoutes(rows, holders, np.arange(8) % 2, source, target, is_agreed=False)
    assert moved_bytes(routes, ["tokens"], network(2)) == {}


@given(count=st.integers(1, 40), size=st.integers(1, 4), dp=st.integers(1, 5))
def test_ranks_of_a_shard_speak_for_parts_as_the_databuffer_cuts_them(count, size, dp):
    shards = np.sort(np.arange(count) % dp)
    spoken = sending_ranks(shards, Layout(tuple(range(dp * size)), dp, tp=size))
    for shard in range(dp):
        mine = spoken[shards == shard] - shard * size
        for place in range(size):
            assert (mine == place).sum() == len(mine) * (place + 1) // size - len(mine) * place // size
        assert (np.diff(mine) >= 0).all()


@pytest.mark.parametrize("world_size", [4, 8, 32])
def test_the_controllers_busiest_interface_carries_as_much_more_as_there_are_ranks(world_size):
    rows = equal_rows(16 * world_size, response=20_000)  # so long that the messages before the exchange are small
    links = network(world_size, **ONE_A_HOST)
    routes = between_pools(world_size, rows, "tokens")
    ours = peer_cost(routes, ["tokens"], np.arange(world_size), links).interface_bytes
    controller = Controller(links.cluster.controllers["one"], links)
    central = controller_cost(routes, ["tokens"], controller).interface_bytes
    # The controller's own rank has no row to send, and rows of equal length need no padding.
    expected = 2 * int(separate_bytes(rows, ["tokens"], is_padded=True).sum()) * (1 - 1 / world_size)
    assert central == pytest.approx(expected)
    # Ours: the even share of a rank in one pool; the controller has all rows, in and out, except for its own.
    assert central / ours == pytest.approx(world_size - 1, rel=0.05)


def test_a_controller_handles_every_byte_itself():
    links = network(3, **ONE_A_HOST)
    sizes, ranks, total = np.array([2, 1]) * 10**6, np.array([1, 2]), 3 * 10**6
    prices = {
        "call_us": (1000.0, 2e-3),  # two ranks have rows
        "copy_gb_per_s": (1e-3, total / 1e6),
        "serialization_gb_per_s": (1e-3, (total + 2 * 10**6) / 1e6),  # the rank with most sends its own besides
        "object_store_gb_per_s": (1e-3, total / 1e6),
        "network_gb_per_s": (1e-3, total / 1e6 - total / 1e9),
    }
    free = {"call_us": 0, "copy_gb_per_s": 1e12, "dataloader_processes": 1}
    for name, (value, seconds) in prices.items():
        costs = []
        for constants in (free, free | {name: value}):
            priced = cluster(controllers={"one": constants}, **ONE_A_HOST).controllers["one"]
            costs.append(Controller(priced, links).exchange(sizes, ranks).seconds)
        assert costs[1] - costs[0] == pytest.approx(seconds, rel=1e-6), name


def test_a_controller_holds_parts_whole_and_what_is_stored():
    links, size = network(2, **ONE_A_HOST), np.array([5000])
    one = links.cluster.controllers["one"]
    stored = one.model_copy(update={"object_store_gb_per_s": 1.0})
    there, here = np.array([1]), np.array([0])
    assert Controller(one, links).exchange(size, there) == Cost(pytest.approx(5000 / 1e9 + 5000 / 1e12), 5000, 10_000)
    assert Controller(stored, links).exchange(size, there).process_bytes == 15_000
    assert Controller(one, links).exchange(size, here).interface_bytes == 0, "rank 0 is on its host"
    assert Controller(one, links).exchange(size * 0, there) == Cost(0.0, 0, 0)


def test_a_controller_that_does_not_pad_moves_as_much_as_there_is():
    rows = SimulatedRows(np.arange(2), np.zeros(2, dtype=np.int64), np.array([10, 90]), are_samples=True)
    links = network(4, **ONE_A_HOST)
    padding = links.cluster.controllers["one"]
    routes = SimulatedRoutes(
        rows, np.array([1, 1]), np.array([0, 1]), Layout((0, 1), 2), Layout((2, 3), 2), is_agreed=False
    )
    moved = [
        controller_cost(routes, ["tokens"], Controller(config, links)).interface_bytes
        for config in (padding, padding.model_copy(update={"pads_rows": False}))
    ]
    assert moved == [2 * 2 * 90 * 8, 2 * 100 * 8]


def test_a_rank_receives_in_place_and_plans_for_all_rows():
    routes = between_pools(4, equal_rows(1000), "tokens")
    held = peer_cost(routes, ["tokens"], np.arange(4), network(4)).process_bytes
    assert held == PLANNING_BYTES_PER_ROW * 1000 + 500 * HELD_BYTES + 500 * ROW_BYTES, "less than what may be staged"


def test_what_is_staged_does_not_grow_with_the_rows():
    held = []
    for count in (100, 200):
        rows = equal_rows(count, response=100_000)
        held.append(peer_cost(between_pools(2, rows, "tokens"), ["tokens"], np.arange(2), network(2)).process_bytes)
        held[-1] -= count * (PLANNING_BYTES_PER_ROW + 24 + 800_000)
    assert held == [ROUNDS_AHEAD * PIECE_BYTES[1]] * 2


def test_every_second_round_waits_for_a_message():
    routes = between_pools(2, equal_rows(100, response=100_000), "tokens")  # 20 pieces: 80 MB, of 4 MiB
    late, soon = (seconds_of(routes, 2, **ONE_A_HOST, links__network__latency_us=value) for value in (1000.0, 0))
    assert late - soon == pytest.approx((1 + 20 / 2) * 1e-3)


def test_rows_that_stay_are_copied_and_what_travels_is_copied_meanwhile():
    both = Layout((0, 1), 2)
    rows = equal_rows(10)
    routes = SimulatedRoutes(rows, np.zeros(10, dtype=np.int64), np.repeat([0, 1], [6, 4]), both, both, is_agreed=False)
    slow = {"links__device__bandwidth_gb_per_s": 1e-6, "links__host__bandwidth_gb_per_s": 1e6}
    assert seconds_of(routes, 2, **slow) == pytest.approx((6 + 4) * ROW_BYTES / 1e3, rel=1e-3)


class Deaf(ProcessGroup):
    """A rank that receives nothing new: what all ranks would say is known before."""

    def gather(self, rows, _what):
        assert not len(rows)
        return self.known


def test_planning_takes_no_more_memory_for_a_row_than_is_counted():
    action, count, ids = pools(512, "tokens"), 100_000, np.arange(100_000)
    costs = np.random.default_rng(0).integers(1, 30_000, count)
    facts = torch.from_numpy(np.stack([ids, ids // 8, costs], axis=1))
    group = Deaf(action.ranks, 300)
    group.known = [*facts.tensor_split(256), *[facts[:0]] * 256]
    tracemalloc.start()  # it sees arrays, not tensors
    try:
        before, _ = tracemalloc.get_traced_memory()
        agree_at_once(action, group, None, None, None, None).delivery(300)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (peak - before) / count + 2 * FACT_BYTES <= PLANNING_BYTES_PER_ROW, "facts as they come, and joined"


def test_a_schema_is_about_as_long_as_is_counted():
    run = Jagged(torch.zeros(1), torch.ones(1, dtype=torch.int64), "response_tokens")
    columns = {"rewards": torch.zeros(1), "old_log_probs": run, "ref_log_probs": run, "reward_details": ({},)}
    text = schemas_to_json(Batch(torch.arange(1), columns))
    assert len(text) / len(columns) == pytest.approx(SCHEMA_BYTES, rel=0.25)


@given(
    count=st.integers(2, 60),
    world_size=st.sampled_from([2, 4, 6]),
    seed=st.integers(0, 9),
    longer=st.integers(1, 500),
)
def test_longer_responses_and_slower_links_never_take_less(count, world_size, seed, longer):
    lengths = np.random.default_rng(seed).integers(1, 400, count)
    groups, zeros = np.arange(count), np.zeros(count, dtype=np.int64)
    short = between_pools(world_size, SimulatedRows(groups, zeros, lengths, are_samples=True), "tokens")
    grown = SimulatedRows(groups, zeros, lengths + longer, are_samples=True)
    long = replace(short, rows=grown)
    assert seconds_of(long, world_size) >= seconds_of(short, world_size)
    assert seconds_of(short, world_size, links__network__bandwidth_gb_per_s=0.5) >= seconds_of(short, world_size)
    moved = parcels_of(short, ["tokens"], network(world_size)).values
    assert moved.sent(world_size).sum() == moved.received(world_size).sum() == 8 * lengths.sum()


def test_weights_cross_once_and_in_buckets():
    action = SyncWeights("policy", Layout((0, 1), 2), Layout((2, 3, 4, 5), 4))
    count = 10**9
    links = network(6, **ONE_A_HOST)
    cost = weights_cost(action, 4 * count, links, is_gathered=False)
    assert cost.interface_bytes == 4 * count // 2, "each of the two that train sends half of it"
    assert cost.seconds == pytest.approx(2 + (2 + 1) / 1000), "over 1 GB/s; packed, and unpacked in quarters"
    assert cost.process_bytes == 2 * DEVICE_WEIGHT_BUCKET_BYTES
    slow = network(6, **ONE_A_HOST, links__network__latency_us=1000)
    late = weights_cost(action, 4 * count, slow, is_gathered=False).seconds
    assert late - cost.seconds == pytest.approx(8 * 2 * 1e-3), "15 buckets, two at a time, to two receivers"
    gathered = weights_cost(action, 4 * count, links, is_gathered=True).seconds
    assert gathered - cost.seconds == pytest.approx(3), "each of four receives the three quarters of the others"


@pytest.mark.parametrize("changed", [0.0003, 0.01, 0.03, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("width", [2, 4])
def test_the_share_of_a_difference_is_that_of_one_that_is_made(changed, width):
    count = 1 << 19
    base = torch.zeros(count * width, dtype=torch.uint8)
    whole = torch.cat([base, torch.zeros(TRAILER, dtype=torch.uint8)])
    generator = torch.Generator().manual_seed(1)
    whole[:-TRAILER].view(BITS[width])[torch.rand(count, generator=generator) < changed] = 1
    message, _ = difference(whole, base, width)
    found = len(whole if message is None else message) / len(whole)
    assert found == pytest.approx(difference_share(changed, width), rel=0.05 if changed > 0.001 else 0.2)


def test_differences_of_weights_cross_in_fewer_bytes_and_are_read_with_those_before():
    action = SyncWeights("policy", Layout((0, 1), 2), Layout((2, 3, 4, 5), 4))
    count, links = 10**9, network(6, **ONE_A_HOST)
    cost = weights_cost(action, 4 * count, links, is_gathered=True, sent_share=0.05)
    assert cost.interface_bytes == 4 * count // 2 // 20
    assert cost.seconds == pytest.approx(0.1 + (2 + 2 + 1 + 1) / 1000 + 3), "all that is gathered is whole"
    both = weights_cost(action, 4 * count, links, is_gathered=True, sent_share=0.05, gathered_share=0.05)
    read = 3 * 4 / links.cluster.device.memory_bandwidth_gb_per_s
    assert both.seconds - cost.seconds == pytest.approx(3 * 0.05 - 3 + read)


def test_a_prediction_is_that_of_the_way_that_is_named():
    rows, action = equal_rows(100), pools(4, "tokens")
    holders = np.repeat([0, 1], 50)
    constants = cluster()
    ours, central = (predict(action, rows, holders, constants, way) for way in ("ours", "one"))
    owners = owners_of(action, rows, holders, {})
    routes = SimulatedRoutes(rows, holders, owners, action.source_layout, action.target_layout, is_agreed=False)
    assert ours == peer_cost(routes, ["tokens"], np.arange(4), network(4))
    assert central == controller_cost(routes, ["tokens"], Controller(constants.controllers["one"], network(4)))
    with pytest.raises(ValueError, match="way 'two' is not in the cluster file 'round numbers': use one of ours, one"):
        predict(action, rows, holders, constants, "two")


def test_errors_are_shares_of_what_was_measured():
    errors = errors_of(Cost(3.0, 50, 120), Cost(2.0, 100, 100))
    assert (errors.seconds, errors.interface_bytes) == (0.5, -0.5)
    assert errors.process_bytes == pytest.approx(0.2)


def test_units_that_stay_together_are_assigned_together():
    rows = equal_rows(8, siblings=4)
    base = pools(4, "tokens")
    action = Reshard("rollout", "rollout", ("tokens",), base.source_layout, base.target_layout, keep_groups=True)
    owners = owners_of(action, rows, np.zeros(32, dtype=np.int64), {})
    assert all(len(set(owners[rows.groups == group])) == 1 for group in range(8))
    assert sorted(np.bincount(owners).tolist()) == [16, 16]
