"""Mean and deviation over all ranks, and whitening."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leaderless.algorithms import Moments, whiten
from leaderless.algorithms.advantages.grpo import grpo_advantages

EPSILON = 1e-6
numbers = st.lists(st.tuples(st.floats(-9, 9, width=32), st.booleans()), max_size=20)


def moments(values: Tensor, is_counted: Tensor, world_size: int = 1) -> Moments:
    parts = zip(values.tensor_split(world_size), is_counted.tensor_split(world_size), strict=True)
    return Moments.of(torch.stack([Moments.count(*part) for part in parts]).sum(0))


def test_moments_and_whitening_worked_by_hand() -> None:
    # 1, 2, 6: mean 3, squared distances 4 + 1 + 9 over 2 = 7. The 100 does not count.
    values, is_counted = torch.tensor([1.0, 2.0, 6.0, 100.0]), torch.tensor([True, True, True, False])
    found = moments(values, is_counted)
    assert (found.mean, found.std) == (pytest.approx(3), pytest.approx(math.sqrt(7)))
    expected = torch.tensor([-2.0, -1.0, 3.0, 0.0]) / math.sqrt(7)
    torch.testing.assert_close(whiten(values, is_counted, found, epsilon=EPSILON), expected, rtol=1e-5, atol=0)


@given(rows=numbers, world_size=st.sampled_from([1, 2, 4]), held=st.sampled_from([math.nan, 1e30, -math.inf]))
def test_moments_and_whitening_equal_a_naive_loop_on_any_number_of_ranks(
    rows: list[tuple[float, bool]], world_size: int, held: float
) -> None:
    counted = [value for value, is_counted in rows if is_counted]
    mean = statistics.fmean(counted) if counted else 0.0
    std = statistics.stdev(counted) if len(set(counted)) > 1 else 0.0
    if std and std < 1e-6 * max(map(abs, counted)):
        return  # as good as equal: see the next test
    values = torch.tensor([value if is_counted else held for value, is_counted in rows])
    is_counted = torch.tensor([ok for _, ok in rows], dtype=torch.bool)
    found = moments(values, is_counted, world_size)
    assert found.mean == pytest.approx(mean, abs=1e-9)
    assert found.std == pytest.approx(std, rel=1e-6, abs=1e-12)
    expected = [(value - mean) / (std + EPSILON) if ok and std else 0.0 for value, ok in rows]
    result = whiten(values, is_counted, found, epsilon=EPSILON)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e6, 1e-20, 1e18])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_equal_values_are_whitened_to_zero(value: float, count: int) -> None:
    values, is_counted = torch.full((count,), value), torch.ones(count, dtype=torch.bool)
    found = moments(values, is_counted, world_size=4)
    assert found.std == 0
    assert found.mean == pytest.approx(float(torch.tensor(value)) if count else 0.0)
    assert not whiten(values, is_counted, found, epsilon=EPSILON).any()


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_whitened_values_have_mean_0_and_deviation_1(scale: float) -> None:
    values = scale * (torch.randn(5000, generator=torch.Generator().manual_seed(0)) + 3)
    is_counted = torch.ones(5000, dtype=torch.bool)
    result = whiten(values, is_counted, moments(values, is_counted), epsilon=1e-30)
    assert result.mean().item() == pytest.approx(0, abs=1e-5)
    assert result.std().item() == pytest.approx(1, rel=1e-5)


def test_bfloat16_values_are_whitened_in_double_precision() -> None:
    values, is_counted = torch.tensor([1.0, 2.0, 6.0]).bfloat16(), torch.ones(3, dtype=torch.bool)
    result = whiten(values, is_counted, moments(values, is_counted), epsilon=EPSILON)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(7), rtol=1e-5, atol=0)
    assert whiten(values, is_counted, Moments(0.0, 0.0), epsilon=EPSILON).dtype == torch.float32


def test_reinforce_pp_with_a_baseline_worked_by_hand() -> None:
    # Groups (1, 0) and (4, 0) are centred to +-1/2 and +-2; of these the mean is 0 and the deviation sqrt(8.5 / 3).
    rewards, groups = torch.tensor([1.0, 0.0, 4.0, 0.0, math.nan]), torch.tensor([0, 0, 1, 1, 1])
    valid = ~rewards.isnan()
    centred = grpo_advantages(rewards, valid, groups, None)
    result = whiten(centred, valid, moments(centred, valid, world_size=2), epsilon=EPSILON)
    expected = torch.tensor([0.5, -0.5, 2.0, -2.0, 0.0]) / math.sqrt(8.5 / 3)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
