"""The assignment of rows to shards."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leaderless.planner.assign.balance import Int, assign, is_repeated, sequence_cost


def ints(values: list[int]) -> Int:
    return np.array(values, dtype=np.int64)


def loads_of(costs: Int, owners: Int, num_shards: int) -> Int:
    return np.bincount(owners, weights=costs, minlength=num_shards).astype(np.int64)


def unit_costs(costs: Int, units: Int) -> Int:
    return np.bincount(np.unique(units, return_inverse=True)[1], weights=costs).astype(np.int64)


def test_cost_grows_with_the_square_of_long_sequences() -> None:
    tokens = ints([0, 1, 1000, 5000])
    assert sequence_cost(tokens, 5000).tolist() == [0, 1, 1200, 2 * 5000]
    assert sequence_cost(tokens, 25_000).tolist() == [0, 1, 1040, 6000]


@given(st.integers(0, 50_000), st.lists(st.integers(0, 50_000), min_size=1, max_size=8))
def test_siblings_cost_their_prompt_once_and_what_each_attends_to(prompt: int, responses: list[int]) -> None:
    tokens = prompt + ints(responses)
    shared = prompt * is_repeated(np.zeros(len(tokens), dtype=np.int64))
    costs = sequence_cost(tokens, 1000, shared)
    assert (costs >= 0).all()
    alone, prompts = sequence_cost(tokens, 1000), sequence_cost(ints([prompt] * (len(tokens) - 1)), 1000)
    assert int(costs.sum()) == int(alone.sum() - prompts.sum())


def test_rows_are_repeated_behind_the_first_of_their_number() -> None:
    assert is_repeated(ints([5, 2, 5, 5, 1, 2])).tolist() == [False, False, True, True, False, True]
    assert is_repeated(ints([])).tolist() == []


@st.composite
def problems(draw: st.DrawFn) -> tuple[Int, Int, Int, int]:
    num_shards = draw(st.integers(1, 9))
    num_rows = draw(st.integers(0, 40))

    def column(low: int, high: int) -> Int:
        return ints(draw(st.lists(st.integers(low, high), min_size=num_rows, max_size=num_rows)))

    return column(0, 1000), column(0, draw(st.integers(0, 40))), column(-1, num_shards - 1), num_shards


@given(problems())
def test_rows_are_divided_evenly_in_whole_units(problem: tuple[Int, Int, Int, int]) -> None:
    costs, units, holders, num_shards = problem
    owners = assign(costs, units, holders, num_shards)
    assert owners.shape == costs.shape
    assert ((owners >= 0) & (owners < num_shards)).all()
    assert np.array_equal(owners, assign(costs, units, holders, num_shards))
    for unit in np.unique(units):
        assert len(set(owners[units == unit].tolist())) == 1
    if len(costs):
        mean = -(-int(costs.sum()) // num_shards)
        assert loads_of(costs, owners, num_shards).max() <= mean + unit_costs(costs, units).max()


@given(problems())
def test_the_order_of_rows_does_not_matter(problem: tuple[Int, Int, Int, int]) -> None:
    costs, _, holders, num_shards = problem
    units = np.arange(len(costs), dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(costs))
    owners = assign(costs, units, holders, num_shards)
    assert np.array_equal(assign(costs[order], units[order], holders[order], num_shards), owners[order])


def test_rows_stay_where_they_are_when_work_is_even() -> None:
    holders = ints([0, 1, 2, 2, 1, 0])
    assert assign(ints([5, 3, 1, 7, 5, 3]), np.arange(6), holders, 3).tolist() == holders.tolist()


def test_only_what_is_over_moves() -> None:
    owners = assign(ints([4, 4, 4, 4, 4, 4]), np.arange(6), ints([0, 0, 0, 0, 1, 1]), 2)
    assert loads_of(ints([4] * 6), owners, 2).tolist() == [12, 12]
    assert owners[4:].tolist() == [1, 1]
    assert (owners != ints([0, 0, 0, 0, 1, 1])).sum() == 1


def test_rows_that_no_shard_holds_are_spread() -> None:
    owners = assign(ints([1] * 8), np.arange(8), ints([-1] * 8), 4)
    assert np.bincount(owners).tolist() == [2, 2, 2, 2]


def test_a_group_held_by_several_shards_comes_together() -> None:
    owners = assign(ints([1] * 8), ints([0, 0, 1, 1, 2, 2, 3, 3]), ints([0, 1] * 4), 2)
    assert owners[::2].tolist() == owners[1::2].tolist()
    assert np.bincount(owners).tolist() == [4, 4]


def test_a_unit_dearer_than_an_even_share_is_placed_before_shards_are_filled() -> None:
    costs, holders = ints([1100] + [10] * 700), ints([0] + [place % 8 for place in range(700)])
    owners = assign(costs, np.arange(701), holders, 8)
    assert loads_of(costs, owners, 8).max() == 1100
    assert owners[0] == 0
    assert (owners != holders).mean() < 0.13
    assert assign(ints([10, 10, 1000]), np.arange(3), ints([0, 1, 1]), 2).tolist() == [0, 0, 1]


def test_units_of_middling_cost_do_not_land_on_filled_shards() -> None:
    costs = ints([6, 6] + [1] * 18)
    owners = assign(costs, np.arange(20), ints([0, 0] + [1] * 9 + [2] * 9), 3)
    assert loads_of(costs, owners, 3).max() == 10


def least_fullest(costs: list[int], num_shards: int) -> int:
    """Work of the fullest shard in the best of all assignments."""
    return min(
        int(loads_of(ints(costs), ints(list(owners)), num_shards).max())
        for owners in product(range(num_shards), repeat=len(costs))
    )


@given(st.data(), st.integers(1, 3), st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(deadline=None)
def test_no_shard_gets_much_more_than_under_the_best_assignment(
    data: st.DataObject, num_shards: int, costs: list[int]
) -> None:
    holders = data.draw(st.lists(st.integers(-1, num_shards - 1), min_size=len(costs), max_size=len(costs)))
    owners = assign(ints(costs), np.arange(len(costs)), ints(holders), num_shards)
    best = least_fullest(costs, num_shards)
    assert loads_of(ints(costs), owners, num_shards).max() <= max(*costs, 4 / 3 * best)


def test_what_is_spread_anew_stays_with_its_holder_where_it_can() -> None:
    costs = ints([7, 6, 5, 4, 9, 9])
    owners = assign(costs, np.arange(6), ints([0, 1, 2, 3, 0, 0]), 4)
    assert loads_of(costs, owners, 4).max() == 11
    assert (owners == ints([0, 1, 2, 3, 0, 0])).sum() >= 3


@pytest.mark.parametrize("keep_groups", [True, False])
def test_a_large_step_is_assigned_within_a_second(keep_groups: bool) -> None:
    num_rows, num_shards, group_size = 131_072, 1024, 8
    random = np.random.default_rng(0)
    costs = sequence_cost(random.lognormal(6.5, 0.8, num_rows).astype(np.int64).clip(1, 16_384), 24_576)
    units = np.arange(num_rows) // (group_size if keep_groups else 1)
    holders = np.arange(num_rows) // (num_rows // num_shards)
    begin = time.process_time()
    owners = assign(costs, units, holders, num_shards)
    seconds = time.process_time() - begin
    loads = loads_of(costs, owners, num_shards)
    before = loads_of(costs, holders, num_shards)
    print(
        f"{num_rows:,} rows to {num_shards:,} shards, groups {'whole' if keep_groups else 'split'}: {seconds:.2f} s, "
        f"fullest shard {loads.max() / loads.mean():.4f} of the mean (was {before.max() / before.mean():.2f}), "
        f"{(owners != holders).mean():.1%} of rows moved"
    )
    assert seconds < 1
    assert loads.max() <= loads.mean() + 1 + unit_costs(costs, units).max()


def test_a_large_step_is_spread_anew_within_a_second() -> None:
    num_rows, num_shards = 131_072, 1024
    costs = np.where(np.arange(num_rows) < 1.3 * num_shards, 1_000_000, 5_000)
    holders = np.arange(num_rows) % num_shards
    begin = time.process_time()
    owners = assign(costs, np.arange(num_rows), holders, num_shards)
    assert time.process_time() - begin < 1
    assert loads_of(costs, owners, num_shards).max() < 2_005_000


def test_work_of_earlier_windows_is_evened_out() -> None:
    before = ints([30, 0])
    owners = assign(ints([10] * 5), np.arange(5), ints([0, 0, 0, 1, 1]), 2, before)
    assert (before + loads_of(ints([10] * 5), owners, 2)).tolist() == [40, 40]
    assert before.tolist() == [30, 0], "what is given is not changed"
    assert (owners == ints([0, 0, 0, 1, 1])).sum() == 3, "only what is over moves"


def test_rows_stay_where_they_are_when_earlier_windows_were_even() -> None:
    holders = ints([0, 0, 1, 1])
    assert assign(ints([10] * 4), np.arange(4), holders, 2, ints([100, 100])).tolist() == holders.tolist()
