"""The loss of a critic. Gradients and invariances are tested with the losses of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from leaderless.algorithms import clipped_value_loss


def test_value_loss_worked_by_hand() -> None:
    # Old 0, clip 0.5. v = 1, R = 2: clipped at 0.5, so (0.5 - 2)^2 / 2. v = 1, R = 0: plain 1/2 above 0.25 / 2.
    # v = 0.25, R = 1: inside the range, 0.75^2 / 2.
    values = torch.tensor([1.0, 1.0, 0.25], requires_grad=True)
    result = clipped_value_loss(values, torch.zeros(3), torch.tensor([2.0, 0.0, 1.0]), clip=0.5)
    torch.testing.assert_close(result.loss, torch.tensor([1.125, 0.5, 0.28125]))
    assert result.is_clipped.tolist() == [True, False, False]
    # A clipped value has no gradient; the others have v - R.
    (gradient,) = torch.autograd.grad(result.loss.sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.0, -0.75]))


@pytest.mark.parametrize("clip", [0.5, math.inf])
def test_no_value_inside_the_range_counts_as_clipped(clip: float) -> None:
    # An old value plus the change from it is not the value in float32: rounding must not look like clipping.
    noise = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 10_000, generator=noise)
    is_inside = (values - old).abs() < 0.5
    values, old, returns = values[is_inside], old[is_inside], returns[is_inside]
    result = clipped_value_loss(values, old, returns, clip=clip)
    assert not result.is_clipped.any()
    torch.testing.assert_close(result.loss, 0.5 * (values - returns).square(), rtol=0, atol=0)


def test_a_critic_that_has_not_moved_has_the_gradient_of_the_squared_error() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), requires_grad=True)
    returns = torch.randn(50, generator=torch.Generator().manual_seed(1))
    loss = clipped_value_loss(values, values.detach(), returns, clip=0.2).loss
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, values.detach() - returns)
