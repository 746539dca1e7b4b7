"""The regret of chosen layouts, and what the benchmark's stages take."""

from __future__ import annotations

import pytest
from benchmarks.placement_parts import generation_seconds, length_of
from benchmarks.placement_report import (
    WORKLOADS,
    Case,
    Results,
    half_and_half,
    prediction_error,
    regret,
    summary,
    table,
)

CASE = Case(
    workload="short_critic",
    workers=3,
    chosen="colocated",
    runs={
        "colocated": {"seconds": 1.1, "predicted": 1.21},
        "rollout 0, policy 1-2, critic 1-2": {"seconds": 2.2, "predicted": 2.2},
        "rollout 0, policy 1, critic 2": {"seconds": 1.0, "predicted": 1.5},
        "rollout 0, policy 1-2, critic 1-2, lag 1": {"seconds": 1.2, "predicted": 1.2},
    },
)


def test_regret_is_measured_against_the_fastest_layout():
    assert regret(CASE) == pytest.approx(0.1)
    assert prediction_error(CASE["runs"]["colocated"]) == pytest.approx(0.1)
    assert half_and_half(CASE) == "rollout 0, policy 1-2, critic 1-2"
    results = Results(cores=2, steps=5, cases=[CASE])
    assert "and 10% slower at worst" in summary(results)
    assert "is off by 10%, that of any layout by 5%" in summary(results)
    assert "two equal pools in lockstep 2.00 times" in summary(results)
    assert "| short_critic | 3 | 4 | colocated | 1.21 | 1.10 | rollout 0, policy 1, critic 2 | 1.00 | 10% |" in table(
        results
    )


def test_responses_wait_for_a_place_and_for_their_environment():
    work = dict(WORKLOADS["short"]["work"], token_s=1.0, places=2, delay_s=0.5)
    assert generation_seconds([4], work) == 4.5
    # Two at a time, each step a tenth longer: the third begins when the second has its answer, at 2 * 1.1 + 0.5.
    assert generation_seconds([4, 2, 2], work) == pytest.approx(2 * (2 * 1.1 + 0.5))
    assert all(1 <= length_of(sample, WORKLOADS["tail"]["work"]) <= 96 for sample in range(200))
