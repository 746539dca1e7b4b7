"""Box, speed and acceleration hold together, whatever is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from leaderless.embodied.robots.safety_limits import Axis, Limiter

numbers = st.floats(allow_nan=False, width=64)


@st.composite
def limiters(draw) -> Limiter:
    axes = [
        Axis("a", low, low + size, speed, acceleration, 1.0)
        for low, size, speed, acceleration in draw(
            st.lists(
                st.tuples(st.floats(-5, 5), st.floats(0.01, 2), st.floats(0.01, 10), st.floats(0.01, 100)),
                min_size=1,
                max_size=3,
            )
        )
    ]
    limiter = Limiter(axes, draw(st.sampled_from([0.002, 0.02, 0.1, 1.0])))
    shares = np.array(draw(st.lists(st.floats(0, 1), min_size=len(axes), max_size=len(axes))))
    limiter.start_at(np.clip(limiter.low + shares * (limiter.high - limiter.low), limiter.low, limiter.high))
    return limiter


def assert_kept(limiter: Limiter, before: np.ndarray, velocity: np.ndarray) -> None:
    scale = np.abs(limiter.low) + np.abs(limiter.high)
    moved = limiter.target - before
    assert (limiter.target >= limiter.low).all()
    assert (limiter.target <= limiter.high).all()
    assert (np.abs(moved) <= limiter._max_speed * limiter._period_s + 1e-9 * scale).all()
    assert (np.abs(moved - limiter.velocity * limiter._period_s) <= 1e-8 * scale).all()
    assert (np.abs(limiter.velocity - velocity) <= limiter._max_change * (1 + 1e-6)).all()


@given(limiters(), st.data())
def test_box_speed_and_acceleration_hold_for_any_wish(limiter, data):
    # Long runs of the same wish are what drives an arm into a wall.
    for wish, num in data.draw(
        st.lists(st.tuples(st.one_of(numbers, st.sampled_from([-1.0, 1.0])), st.integers(1, 40)))
    ):
        for _ in range(num):
            before, velocity = limiter.target, limiter.velocity
            limiter.advance(np.full(len(before), wish))
            assert_kept(limiter, before, velocity)


@given(limiters(), st.lists(st.floats(0, 1), min_size=3, max_size=3), st.integers(0, 30))
def test_any_place_in_the_box_is_reached_within_the_limits(limiter, shares, num_away):
    goal = limiter.low + np.array(shares)[: len(limiter.low)] * (limiter.high - limiter.low)
    goal = np.clip(goal, limiter.low, limiter.high)
    for _ in range(num_away):
        limiter.advance(np.ones(len(goal)))
    size = limiter.high - limiter.low
    time_s = (size / limiter._max_speed + 4 * np.sqrt(size * limiter._period_s / limiter._max_change)).max()
    time_s += 4 * (limiter._max_speed * limiter._period_s / limiter._max_change).max()
    num_periods = int(3 * time_s / limiter._period_s) + 20
    assume(num_periods < 20_000)
    for _ in range(num_periods):
        before, velocity = limiter.target, limiter.velocity
        is_there = limiter.advance_towards(goal)
        assert_kept(limiter, before, velocity)
        if is_there:
            break
    assert is_there
    assert (limiter.target == goal).all()
    assert limiter.is_at_rest


def test_limits_are_used_to_the_full():
    limiter = Limiter([Axis("x", 0.0, 10.0, 1.0, 1.0, 1.0)], 0.5)
    limiter.start_at(np.array([0.0]))
    changed = [limiter.advance(np.array([1.0])) for _ in range(4)]
    assert changed == [True, False, False, False]  # from 0 to 0.5 m/s it accelerates at its limit
    assert limiter.target[0] == pytest.approx(0.25 + 3 * 0.5)
    for _ in range(60):
        limiter.advance(np.array([1.0]))
    assert limiter.target[0] == pytest.approx(10.0)


def test_an_axis_without_a_box_is_refused():
    with pytest.raises(ValueError, match="low must be below high"):
        Axis("x", 1.0, 0.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="max_speed=0 must be"):
        Axis("x", 0.0, 1.0, 0.0, 1.0, 1.0)
