"""The seconds that a fixed lag promises."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
from benchmarks.fixed_lag_report import Results, Run, Times, constant_times, drawn_times, load, promised_seconds, table
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


def times_of(pairs: list[tuple[int, int]]) -> Times:
    return Times(generation=[float(first) for first, _ in pairs], training=[float(second) for _, second in pairs])


@pytest.mark.parametrize(
    ("pairs", "lag", "seconds"),
    [
        ([(1, 1)] * 10, 0, 20),
        ([(1, 1)] * 10, 1, 11),
        ([(1, 2)] * 10, 1, 1 + 20),
        ([(3, 2)] * 10, 2, 30 + 2),
        # With a lag of 1, the fourth waits for the second to be trained, at 9; with a lag of 2, for the first, at 5.
        ([(4, 1), (1, 4), (1, 1), (4, 1)], 1, 14),
        ([(4, 1), (1, 4), (1, 1), (4, 1)], 2, 11),
    ],
)
def test_promised_seconds_are_those_worked_out_by_hand(pairs: list[tuple[int, int]], lag: int, seconds: float) -> None:
    assert promised_seconds(times_of(pairs), lag) == seconds


@given(SECONDS)
def test_lockstep_takes_the_sum_and_an_unbounded_lag_waits_for_rows_only(pairs: list[tuple[int, int]]) -> None:
    times = times_of(pairs)
    assert promised_seconds(times, 0) == sum(times["generation"]) + sum(times["training"])
    rows = list(accumulate(times["generation"]))
    # The last iteration at which training had to wait determines the end.
    end = max(ready + sum(times["training"][k:]) for k, ready in enumerate(rows))
    assert promised_seconds(times, len(pairs)) == end


@given(SECONDS, st.integers(0, 4))
def test_more_lag_never_takes_longer(pairs: list[tuple[int, int]], lag: int) -> None:
    assert promised_seconds(times_of(pairs), lag + 1) <= promised_seconds(times_of(pairs), lag)


def test_drawn_times_are_always_the_same_and_leave_something_to_gain() -> None:
    assert drawn_times(12) == drawn_times(12)
    seconds = [promised_seconds(drawn_times(12), lag) for lag in range(3)]
    assert seconds[0] > 1.3 * seconds[1] > 1.3 * seconds[2]
    constant = [promised_seconds(constant_times(12), lag) for lag in range(3)]
    assert constant[1] == constant[2] == pytest.approx(constant[0] * 13 / 24)


def test_runs_are_compared_with_lockstep_on_as_many_ranks(tmp_path: Path) -> None:
    lockstep = Run(ranks=2, times="drawn", lag=0, promised_s=10.0, measured_s=12.0)
    ahead = Run(ranks=2, times="drawn", lag=1, promised_s=5.0, measured_s=6.0)
    other = Run(ranks=1, times="drawn", lag=1, promised_s=5.0, measured_s=5.0)
    lines = table(Results(cores=2, iterations=3, runs=[lockstep, ahead, other])).splitlines()[2:]
    assert lines == [
        "| 2 + 2 | drawn | lockstep | 10.00 | 12.00 | 1.200 | 1.00 × |",
        "| 2 + 2 | drawn | 1 | 5.00 | 6.00 | 1.200 | 2.00 × |",
        "| 1 + 1 | drawn | 1 | 5.00 | 5.00 | 1.000 |  |",
    ]
    assert load(tmp_path / "none.json") is None
