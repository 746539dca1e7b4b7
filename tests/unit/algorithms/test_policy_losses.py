"""Losses of single tokens: values worked by hand, twins, gradients, and their form on policy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.algorithms.naive import (
    AGGREGATIONS,
    CASES,
    Token,
    clipped,
    loss_of,
    packed,
    random_batch,
    responses,
    tokens,
    with_one_advantage,
)

from leaderless.algorithms import Denominators, token_weights
from leaderless.algorithms.losses.cispo import CispoLoss
from leaderless.algorithms.losses.cpgd import CpgdLoss
from leaderless.algorithms.losses.dppo import DppoLoss
from leaderless.algorithms.losses.ppo import PpoLoss
from leaderless.algorithms.losses.reinforce import ReinforceLoss
from leaderless.algorithms.losses.sapo import SapoLoss
from leaderless.algorithms.losses.topr import ToprLoss
from leaderless.algorithms.losses.vespo import VespoLoss


def test_clipped_loss_worked_by_hand() -> None:
    # ratio 1.5, A 2: min(3, 1.3 * 2 = 2.6); A -2: min(-3, -2.6); ratio 0.5, A 2: min(1, 1.6); A -2: min(-1, -1.6).
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    gain = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0])
    result = loss_of(PpoLoss(clip_low=0.2, clip_high=0.3), ratio.log(), torch.zeros(5), gain)
    torch.testing.assert_close(result.loss, torch.tensor([-2.0, -2.6, 3.0, -1.0, 1.6]))
    assert result.is_clipped.tolist() == [False, True, False, False, True]


def test_dual_clip_worked_by_hand() -> None:
    # At ratio 4, A -2 the surrogate is -8; dual clip at 3 stops it at -6. At ratio 2 it is -4, above. A 2: untouched.
    ratio, gain = torch.tensor([4.0, 2.0, 4.0]), torch.tensor([-2.0, -2.0, 2.0])
    result = loss_of(PpoLoss(clip_low=0.2, clip_high=0.2, dual_clip=3.0), ratio.log(), torch.zeros(3), gain)
    torch.testing.assert_close(result.loss, torch.tensor([6.0, 4.0, -2.4]))
    assert result.is_clipped.tolist() == [True, False, True]


def test_reinforce_worked_by_hand() -> None:
    # -A log p = -2 * -0.5 and 3 * -1.
    result = loss_of(ReinforceLoss(), torch.tensor([-0.5, -1.0]), torch.tensor([-0.5, -1.0]), torch.tensor([2.0, -3.0]))
    torch.testing.assert_close(result.loss, torch.tensor([1.0, -3.0]))
    assert not result.is_clipped.any()


def test_cispo_worked_by_hand() -> None:
    # Weights min(2, 1.3) and max(0.5, 0) = 0.5; losses -1.3 * 2 * log 2 and -0.5 * 2 * log 0.5.
    log_probs = torch.tensor([2.0, 0.5]).log()
    result = loss_of(CispoLoss(clip_low=1.0, clip_high=0.3), log_probs, torch.zeros(2), torch.tensor([2.0, 2.0]))
    torch.testing.assert_close(result.loss, torch.tensor([-2.6 * math.log(2), math.log(2)]))
    assert result.is_clipped.tolist() == [True, False]


def test_sapo_worked_by_hand() -> None:
    # At ratio 1, (4 / t) sigmoid(0) A = 2 A / t; at ratio 2 and t 1, 4 sigmoid(1).
    ratio, gain = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([3.0, -3.0, 1.0])
    result = loss_of(SapoLoss(temperature_positive=1.0, temperature_negative=2.0), ratio.log(), torch.zeros(3), gain)
    torch.testing.assert_close(result.loss, torch.tensor([-6.0, 3.0, -4 / (1 + math.exp(-1))]))


def test_cpgd_worked_by_hand() -> None:
    # Ratio 2, A 1: -min(log 2, log 1.3) + 0.5 (2 - 1 - log 2). Ratio 0.5, A 1: log 2 + 0.5 (0.5 - 1 + log 2).
    log_probs = torch.tensor([2.0, 0.5]).log().requires_grad_()
    settings = {"clip_low": 0.2, "clip_high": 0.3, "drift_coefficient": 0.5, "drift_clip": 0.4}
    result = loss_of(CpgdLoss(**settings), log_probs, torch.zeros(2), torch.ones(2))
    expected = [-math.log(1.3) + 0.5 * (1 - math.log(2)), math.log(2) + 0.5 * (math.log(2) - 0.5)]
    torch.testing.assert_close(result.loss, torch.tensor(expected))
    assert result.is_clipped.tolist() == [True, False]
    # Gradients: clipped, so the drift alone, 0.5 min(2 - 1, 0.4); and -1 + 0.5 (0.5 - 1).
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([0.2, -1.25]))


def test_dppo_worked_by_hand() -> None:
    # From 0.5: to 0.7 with A > 0 leaves a region of 0.1, with A < 0 returns to it; 0.55 stays inside. A rare token may
    # grow tenfold: from 0.001 to 0.01 is a shift of 0.009, and its weight is cut at 4.
    log_probs = torch.tensor([0.7, 0.7, 0.55, 0.01]).log().requires_grad_()
    behavior, gain = torch.tensor([0.5, 0.5, 0.5, 0.001]).log(), torch.tensor([1.0, -1.0, 2.0, 1.0])
    result = loss_of(DppoLoss(divergence="total_variation", threshold=0.1, max_ratio=4.0), log_probs, behavior, gain)
    assert result.is_clipped.tolist() == [True, False, False, False]
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.4, -2.2, -4.0]))
    # The same shift is a divergence of 0.5 log(0.5 / 0.7) + 0.5 log(0.5 / 0.3) = 0.0872.
    for threshold, is_outside in ((0.08, True), (0.09, False)):
        result = loss_of(DppoLoss(divergence="kl", threshold=threshold, max_ratio=4.0), log_probs, behavior, gain)
        assert result.is_clipped.tolist() == [is_outside, False, False, False]


def test_a_token_that_has_become_certain_is_at_a_finite_distance() -> None:
    result = loss_of(
        DppoLoss(divergence="kl", threshold=0.05, max_ratio=2.0), torch.zeros(1), torch.tensor([-1.0]), torch.ones(1)
    )
    assert result.is_clipped.tolist() == [True]
    assert result.loss.isfinite().all()


def test_topr_worked_by_hand() -> None:
    # Responses of ratios 1/2 * 1/2, 2 * 3 and 2 * 4, of which the last is good: weights 1/4, 1 and 1.
    ratio = torch.tensor([0.5, 0.5, 2.0, 3.0, 2.0, 4.0])
    log_probs = torch.full((6,), -2.0, requires_grad=True)
    gain, lengths = torch.tensor([-1.0, -1.0, -2.0, -2.0, 3.0, 3.0]), torch.tensor([2, 2, 2])
    result = loss_of(ToprLoss(), log_probs, -2 - ratio.log(), gain, lengths)
    weights = torch.tensor([0.25, 0.25, 1.0, 1.0, 1.0, 1.0])
    torch.testing.assert_close(result.metrics["taper"], weights)
    torch.testing.assert_close(result.loss, 2 * weights * gain)
    (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -weights * gain)
    assert result.is_clipped.tolist() == [False, False, True, True, False, False]


def test_a_bad_response_of_any_age_loses_its_gradient_under_topr_before_its_probability_is_0() -> None:
    # The gradient of a response that has become e^-30 times as likely is 2e-9, of a cut ratio; REINFORCE has 1.
    log_probs = torch.tensor([-31.0], requires_grad=True)
    loss = loss_of(ToprLoss(), log_probs, torch.tensor([-1.0]), torch.tensor([-1.0])).loss
    assert 0 < torch.autograd.grad(loss.sum(), log_probs)[0].item() < 1e-8


def test_vespo_worked_by_hand() -> None:
    # A response of ratio 1/2 * 4 = 2: 2^2 e^(3 (1 - 2)) = 4 e^-3 if it is good, 2^3 e^(2 (1 - 2)) = 8 e^-2 if not.
    old = -3 - torch.tensor([0.5, 4.0]).log()
    for gain, weight in ((1.5, 4 * math.exp(-3)), (-1.5, 8 * math.exp(-2))):
        log_probs = torch.full((2,), -3.0, requires_grad=True)
        result = loss_of(VespoLoss(), log_probs, old, torch.full((2,), gain))
        torch.testing.assert_close(result.metrics["kernel"], torch.full((2,), weight))
        torch.testing.assert_close(result.loss, torch.full((2,), 3 * weight * gain))
        (gradient,) = torch.autograd.grad(result.loss.sum(), log_probs)
        torch.testing.assert_close(gradient, torch.full((2,), -weight * gain))


@pytest.mark.parametrize("gain", [1.0, -1.0])
def test_the_kernel_of_vespo_is_1_at_ratio_1_and_largest_at_power_over_rate(gain: float) -> None:
    loss = VespoLoss(power_positive=2.0, rate_positive=4.0, power_negative=3.0, rate_negative=2.0)
    ratios = torch.linspace(0.05, 4.0, 80, dtype=torch.float64)
    result = loss_of(loss, ratios.log(), torch.zeros(80), torch.full((80,), gain), torch.ones(80, dtype=torch.int64))
    kernel = result.metrics["kernel"]
    assert float(ratios[kernel.argmax()]) == pytest.approx(0.5 if gain > 0 else 1.5)
    assert float(kernel[19]) == pytest.approx(1.0)
    assert float(kernel[0]) < 0.2
    assert float(kernel[-1]) < 0.2


@pytest.mark.parametrize("name", CASES)
@given(batch=responses)
def test_losses_equal_a_naive_loop(name: str, batch: list[list[Token]]) -> None:
    case = CASES[name]
    if case.is_per_response:
        batch = [with_one_advantage(response) for response in batch]
    result = case.loss(*packed(batch)).loss
    expected = [loss for response in batch if response for loss in case.twin(response)]
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


@given(batch=st.lists(tokens, min_size=1), low=st.floats(0.01, 0.9), high=st.floats(0.01, 2), dual=st.floats(3, 9))
def test_the_clipped_loss_equals_a_naive_loop_for_all_settings(
    batch: list[Token], low: float, high: float, dual: float
) -> None:
    new, old, gain, _ = packed([batch])
    result = loss_of(PpoLoss(clip_low=low, clip_high=high, dual_clip=dual), new, old, gain)
    expected = [clipped(token, low, high, dual) for token in batch]
    torch.testing.assert_close(result.loss, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_finite_differences_or_with_the_formula(name: str, seed: int) -> None:
    case = CASES[name]
    batch = random_batch(seed, [9, 0, 1, 7, 12], is_per_response=case.is_per_response)
    new, old, gain, lengths = packed(batch)
    new.requires_grad_()
    if case.slope is None:
        # The choice of tokens is discrete, and no log-prob lies on its boundary.
        assert torch.autograd.gradcheck(lambda x: case.loss(x, old, gain, lengths).loss, new)
        return
    (gradient,) = torch.autograd.grad(case.loss(new, old, gain, lengths).loss.sum(), new)
    expected = [slope for response in batch if response for slope in case.slope(response)]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "name", ["ppo", "clip_higher", "dual_clip", "cpgd", "dppo", "dppo_kl", "gspo", "clip_cov", "m2po"]
)
def test_clipped_tokens_are_those_without_a_gradient_of_their_own(name: str) -> None:
    new, old, gain, lengths = packed(random_batch(5, [40, 40], is_per_response=False))
    if name == "gspo":
        lengths = torch.ones(80, dtype=torch.int64)  # so that some responses are clipped and some are not
    if name == "cpgd":
        result = loss_of(
            CpgdLoss(clip_low=0.2, clip_high=0.3, drift_coefficient=0.0, drift_clip=1.0),
            new.requires_grad_(),
            old,
            gain,
        )
    else:
        result = CASES[name].loss(new.requires_grad_(), old, gain, lengths)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    assert 0 < result.is_clipped.sum() < 80
    torch.testing.assert_close(gradient == 0, result.is_clipped)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_reinforce_on_policy])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, aggregation: str) -> None:
    new, _, gain, lengths = packed(random_batch(1, [5, 0, 1, 8], is_per_response=CASES[name].is_per_response))
    is_valid = torch.tensor([True, True, True, False])
    totals = Denominators(*Denominators.count(lengths, is_valid).tolist())
    weights = token_weights(aggregation, lengths, is_valid, totals, norm_tokens=16)
    new.requires_grad_()
    loss = (weights * CASES[name].loss(new, new.detach(), gain, lengths).loss).sum()
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(gradient, -(weights * gain).double())


def test_a_response_far_below_the_old_policy_keeps_its_gradient_under_cpgd() -> None:
    # The log-ratio does not overflow, so that nothing needs to be cut: -A, and the drift's 0.1 (e^-50 - 1).
    log_probs = torch.tensor([-50.0], requires_grad=True)
    loss = loss_of(
        CpgdLoss(clip_low=0.2, clip_high=0.2, drift_coefficient=0.1, drift_clip=5.0),
        log_probs,
        torch.zeros(1),
        torch.ones(1),
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-1.1]))


@pytest.mark.parametrize("ratio", [0.2, 0.7, 1.0, 1.6, 5.0])
def test_the_gradient_of_sapo_is_that_of_the_ratio_times_a_bell(ratio: float) -> None:
    # With p the gate's sigmoid, 4 p (1 - p) ratio A: 1 at ratio 1, and falling to both sides.
    log_probs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    gain = torch.tensor([2.0], dtype=torch.float64)
    loss = loss_of(SapoLoss(temperature_positive=3.0, temperature_negative=1.0), log_probs, torch.zeros(1), gain).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    p = 1 / (1 + math.exp(-3 * (ratio - 1)))
    assert gradient.item() == pytest.approx(-4 * p * (1 - p) * ratio * 2, rel=1e-6)
