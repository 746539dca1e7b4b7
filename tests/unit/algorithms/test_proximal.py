"""The policy before a step's updates, between the one that sampled and the current one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leaderless.algorithms import interpolated_log_probs


def test_it_lies_on_the_way_by_the_number_of_updates() -> None:
    # Sampled by versions 4 to 7; the step began at 6 and is at 8: 2 of 4, 1 of 3 and 0 of 2 updates lay behind.
    new, rollout = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-3.0, -4.0, -2.0])
    found = interpolated_log_probs(new, rollout, torch.tensor([4, 5, 6]), before=6, now=8)
    torch.testing.assert_close(found, torch.tensor([-2.0, -3.0, -2.0]))


def test_before_the_first_update_of_a_step_it_is_the_current_policy() -> None:
    new, rollout = torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-3.0, -4.0])
    found = interpolated_log_probs(new, rollout, torch.tensor([6, 3]), before=6, now=6)
    assert found.tolist() == new.tolist()
    assert not found.requires_grad


@given(
    new=st.floats(-9, 0),
    rollout=st.floats(-9, 0),
    age=st.integers(0, 8),
    updates=st.integers(0, 8),
)
def test_it_equals_the_formula_of_the_paper(new: float, rollout: float, age: int, updates: int) -> None:
    """The paper has one update between the proximal policy and the current one: 1 / d of the way is left."""
    d = age + updates
    share = age / d if d else 1.0
    if updates == 1:
        assert share == pytest.approx(1 - 1 / d)
    found = interpolated_log_probs(
        torch.tensor([new], dtype=torch.float64),
        torch.tensor([rollout], dtype=torch.float64),
        torch.tensor([10 - age]),
        before=10,
        now=10 + updates,
    )
    assert found.item() == pytest.approx((1 - share) * rollout + share * new)


def test_half_precision_is_widened() -> None:
    low = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert interpolated_log_probs(low, low, torch.tensor([1]), before=2, now=3).dtype == torch.float32
