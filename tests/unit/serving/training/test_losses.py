"""Losses of the Tinker API against values worked by hand, and their gradients against differences."""

from __future__ import annotations

import math

import pytest
import torch

from leaderless.serving.training.losses import LOSSES, loss_of

LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
INPUTS = {
    "weights": torch.tensor([0.0, 1.0, 0.5, -2.0], dtype=torch.float64),
    "logprobs": torch.tensor([-1.0, -1.0, -1.0, -3.05], dtype=torch.float64),
    "advantages": torch.tensor([1.0, -1.0, 2.0, 0.5], dtype=torch.float64),
}
RATIOS = [1.0, math.exp(-1), math.exp(0.5), math.exp(0.05)]
BY_HAND = {
    "cross_entropy": [0.0, 2.0, 0.25, -6.0],
    "importance_sampling": [-1.0, RATIOS[1], -2 * RATIOS[2], -0.5 * RATIOS[3]],
    "ppo": [-1.0, 0.8, -2 * 1.2, -0.5 * RATIOS[3]],
    "cispo": [1.0, -2.0 * RATIOS[1], 2 * 0.5 * RATIOS[2], 0.5 * 3 * RATIOS[3]],
    "dro": [1.0, -2.0 + 0.025, 1.0 + 0.025 * 0.25, 1.5 + 0.025 * 0.0025],
}


def value(name: str, log_probs: torch.Tensor, **settings: float) -> torch.Tensor:
    loss = loss_of(name)
    return loss.compute(log_probs, INPUTS, loss.settings(settings))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_what_was_worked_by_hand(name: str) -> None:
    assert value(name, LOG_PROBS).tolist() == pytest.approx(BY_HAND[name], abs=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cispo"])  # whose weight has no gradient
def test_the_gradient_of_a_loss_is_that_of_differences(name: str) -> None:
    assert torch.autograd.gradcheck(lambda x: value(name, x), LOG_PROBS.clone().requires_grad_(), atol=1e-6)


def test_the_weight_of_cispo_has_no_gradient() -> None:
    log_probs = LOG_PROBS.clone().requires_grad_()
    value("cispo", log_probs).sum().backward()
    wanted = [-ratio * advantage for ratio, advantage in zip(RATIOS, INPUTS["advantages"].tolist(), strict=True)]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx(wanted)


def test_limits_are_those_that_were_given() -> None:
    found = value("ppo", LOG_PROBS, clip_low_threshold=0.5, clip_high_threshold=1.5)
    assert found.tolist() == pytest.approx([-1.0, 0.5, -3.0, -0.5 * RATIOS[3]])
    assert value("dro", LOG_PROBS, beta=0.0).tolist() == pytest.approx([1.0, -2.0, 1.0, 1.5])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cross_entropy", {"beta": 1.0}, "has the settings: none"),
        ("ppo", {"clip": 1.0}, "clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": "much"}, "give a number"),
        ("dro", {"beta": math.inf}, "give a number"),
    ],
)
def test_other_settings_are_refused(name: str, settings: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(name).settings(settings)


def test_other_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_fn='sum' is not offered here: use one of cross_entropy, "):
        loss_of("sum")
