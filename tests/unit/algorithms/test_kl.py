"""Estimates of the divergence: exact over all outcomes of a small distribution, in value and in gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.unit.algorithms.naive import KL_TWINS
from torch import Tensor

from leaderless.algorithms import KlEstimator, adapted_coefficient, kl_penalty

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3", "absolute")

logits = st.lists(st.floats(-3, 3), min_size=4, max_size=4).map(lambda x: torch.tensor(x, dtype=torch.float64))


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two vectors of log-probabilities."""
    return (p.exp() * (p - q)).sum()


def expected_gradient(theta: Tensor, reference: Tensor, estimator: KlEstimator, *, unbiased: bool) -> Tensor:
    """Gradient of the estimate as a term of the loss, over all tokens that the policy may sample."""
    leaf = theta.clone().requires_grad_()
    log_probs = leaf.log_softmax(0)
    estimate = kl_penalty(log_probs, reference, estimator, unbiased_gradient=unbiased)
    (gradient,) = torch.autograd.grad((log_probs.detach().exp() * estimate).sum(), leaf)
    return gradient


def exact_gradient(theta: Tensor, reference: Tensor, *, reverse: bool = False) -> Tensor:
    leaf = theta.clone().requires_grad_()
    log_probs = leaf.log_softmax(0)
    value = divergence(reference, log_probs) if reverse else divergence(log_probs, reference)
    return torch.autograd.grad(value, leaf)[0]


def test_estimates_worked_by_hand() -> None:
    # x = log p - log p_ref = 1 and -2.
    log_probs, ref = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -1.0])
    expected = {
        "k1": [1.0, -2.0],
        "k2": [0.5, 2.0],
        "k3": [math.exp(-1) - 1 + 1, math.exp(2) - 1 - 2],
        "absolute": [1.0, 2.0],
    }
    for estimator in ESTIMATORS:
        for unbiased in (False, True):
            result = kl_penalty(log_probs, ref, estimator, unbiased_gradient=unbiased)
            torch.testing.assert_close(result, torch.tensor(expected[estimator]))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0)), min_size=1))
def test_estimates_equal_a_naive_loop(estimator: KlEstimator, pairs: list[tuple[float, float]]) -> None:
    log_probs, ref = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    expected = torch.tensor([KL_TWINS[estimator](p - q) for p, q in pairs], dtype=torch.float64)
    torch.testing.assert_close(kl_penalty(log_probs, ref, estimator), expected)


@given(theta=logits, other=logits)
def test_k1_and_k3_are_the_divergence_on_average(theta: Tensor, other: Tensor) -> None:
    policy, reference = theta.log_softmax(0), other.log_softmax(0)
    for estimator in ("k1", "k3"):
        average = (policy.exp() * kl_penalty(policy, reference, estimator)).sum()
        torch.testing.assert_close(average, divergence(policy, reference), atol=1e-12, rtol=1e-9)


@given(st.lists(st.tuples(st.floats(-1e4, 0, width=32), st.floats(-1e4, 0, width=32)), min_size=1))
def test_k3_is_never_negative(pairs: list[tuple[float, float]]) -> None:
    log_probs, ref = torch.tensor(pairs).unbind(1)
    assert (kl_penalty(log_probs, ref, "k3") >= 0).all()


def test_k3_near_0_is_not_rounding_noise() -> None:
    # x^2 / 2 to first order: 5e-9 for x = 1e-4, where e^-x - 1 + x in float32 gives multiples of 6e-8, if anything.
    difference = torch.tensor([1e-4, -1e-4])
    torch.testing.assert_close(kl_penalty(difference, torch.zeros(2), "k3"), torch.full((2,), 5e-9), rtol=1e-2, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(theta=logits, other=logits)
def test_the_unbiased_form_has_the_gradient_of_the_divergence(
    estimator: KlEstimator, theta: Tensor, other: Tensor
) -> None:
    reference = other.log_softmax(0)
    result = expected_gradient(theta, reference, estimator, unbiased=True)
    torch.testing.assert_close(result, exact_gradient(theta, reference), atol=1e-9, rtol=1e-7)


@given(theta=logits, other=logits)
def test_the_plain_forms_have_the_gradients_that_their_docstring_says(theta: Tensor, other: Tensor) -> None:
    reference = other.log_softmax(0)
    expected = {
        "k1": torch.zeros(4, dtype=torch.float64),
        "k2": exact_gradient(theta, reference),
        "k3": exact_gradient(theta, reference, reverse=True),
    }
    for estimator, gradient in expected.items():
        result = expected_gradient(theta, reference, estimator, unbiased=False)
        torch.testing.assert_close(result, gradient, atol=1e-9, rtol=1e-7)


@given(theta=logits, other=logits)
def test_the_absolute_value_has_the_gradient_of_the_distance_of_probabilities(theta: Tensor, other: Tensor) -> None:
    reference = other.log_softmax(0)
    assume(bool(((theta.log_softmax(0) - reference).abs() > 1e-9).all()))  # where they are equal there is a kink
    leaf = theta.clone().requires_grad_()
    (expected,) = torch.autograd.grad((leaf.softmax(0) - reference.exp()).abs().sum(), leaf)
    result = expected_gradient(theta, reference, "absolute", unbiased=False)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=1e-7)


def gradient_in_reward(theta: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Expected gradient of a penalty on the reward, over all responses of two tokens.

    The policy, theta of logits [1 + v, v], draws the first token from its first row, and the second one from the row
    of the first; the penalty of a token is that of itself and of what follows.
    """
    leaf = theta.clone().requires_grad_()
    first, second = leaf.log_softmax(1)[0], leaf.log_softmax(1)[1:]
    one, two = (kl_penalty(p, q, estimator).detach() for p, q in ((first, reference[0]), (second, reference[1:])))
    surrogate = (one[:, None] + two) * first[:, None] + two * second
    probability = (first[:, None] + second).exp().detach()
    return torch.autograd.grad((probability * surrogate).sum(), leaf)[0]


def gradient_of_responses(theta: Tensor, reference: Tensor, *, reverse: bool = False) -> Tensor:
    """Gradient of the divergence between the distributions of these responses."""
    leaf = theta.clone().requires_grad_()
    policy = leaf.log_softmax(1)
    joint, other = ((one[0][:, None] + one[1:]).flatten() for one in (policy, reference))
    value = divergence(other, joint) if reverse else divergence(joint, other)
    return torch.autograd.grad(value, leaf)[0]


policies = st.lists(st.floats(-3, 3), min_size=12, max_size=12).map(
    lambda values: torch.tensor(values, dtype=torch.float64).view(4, 3)
)


@given(theta=policies, other=policies)
def test_in_the_reward_k1_has_the_gradient_of_the_divergence(theta: Tensor, other: Tensor) -> None:
    reference = other.log_softmax(1)
    result = gradient_in_reward(theta, reference, "k1")
    torch.testing.assert_close(result, gradient_of_responses(theta, reference), atol=1e-9, rtol=1e-7)


def test_in_the_reward_only_k1_leads_back_to_the_reference() -> None:
    noise = torch.Generator().manual_seed(0)
    similarity = {estimator: list[float]() for estimator in ESTIMATORS}
    for _ in range(100):
        theta, other = torch.randn(2, 4, 3, generator=noise, dtype=torch.float64)
        reference = other.log_softmax(1)
        exact = gradient_of_responses(theta, reference)
        for estimator, found in similarity.items():
            result = gradient_in_reward(theta, reference, estimator)
            found.append(torch.cosine_similarity(result.flatten(), exact.flatten(), dim=0).item())
    assert min(similarity["k1"]) > 1 - 1e-9
    for estimator in ("k2", "k3", "absolute"):
        assert sum(value < 0 for value in similarity[estimator]) > 10, estimator


@given(theta=logits, other=logits)
def test_in_the_reward_k3_has_the_difference_of_both_divergences(theta: Tensor, other: Tensor) -> None:
    reference = other.log_softmax(0)
    leaf = theta.clone().requires_grad_()
    log_probs = leaf.log_softmax(0)
    penalty = kl_penalty(log_probs, reference, "k3").detach()
    (result,) = torch.autograd.grad((log_probs.detach().exp() * penalty * log_probs).sum(), leaf)
    expected = exact_gradient(theta, reference) - exact_gradient(theta, reference, reverse=True)
    torch.testing.assert_close(result, expected, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_tokens_far_above_or_below_the_reference_keep_their_gradient(estimator: KlEstimator) -> None:
    # x = 1000 and -1000: 1, x, 1 - e^-x and sign(x). Only k3 overflows below, and is cut there.
    log_probs = torch.tensor([0.0, -1000.0], requires_grad=True)
    value = kl_penalty(log_probs, torch.tensor([-1000.0, 0.0]), estimator)
    (gradient,) = torch.autograd.grad(value.sum(), log_probs)
    expected = {"k1": [1.0, 1.0], "k2": [1000.0, -1000.0], "k3": [1.0, 0.0], "absolute": [1.0, -1.0]}
    assert gradient.tolist() == expected[estimator]
    assert value.isfinite().all()


def test_the_adapted_coefficient_worked_by_hand() -> None:
    # 10 % above the target, 1/4 of the horizon: 1 + 0.1 / 4. Thrice the target: 1 + 0.2 / 4. Nothing: 1 - 0.2 / 4.
    settings = {"target": 0.1, "horizon": 400, "num_episodes": 100}
    assert adapted_coefficient(2.0, 0.11, **settings) == pytest.approx(2 * 1.025)
    assert adapted_coefficient(2.0, 0.3, **settings) == pytest.approx(2 * 1.05)
    assert adapted_coefficient(2.0, 0.0, **settings) == pytest.approx(2 * 0.95)
    assert adapted_coefficient(2.0, math.inf, **settings) == pytest.approx(2 * 1.05)


@given(kl=st.floats(-9, 9), horizon=st.floats(1, 1e6), num_episodes=st.integers(1, 10**6))
def test_the_adapted_coefficient_stays_positive_and_moves_by_at_most_a_fifth(
    kl: float, horizon: float, num_episodes: int
) -> None:
    result = adapted_coefficient(1.0, kl, target=0.1, horizon=horizon, num_episodes=num_episodes)
    assert 0.8 - 1e-9 <= result <= 1.2 + 1e-9
    assert (result - 1) * (kl - 0.1) >= 0


@pytest.mark.parametrize("start", [1e-4, 0.05, 10.0])
def test_adapting_brings_the_divergence_to_its_target(start: float) -> None:
    # A policy that drifts until the penalty holds it: its divergence is 0.02 / coefficient, measured with an error.
    coefficient, noise = start, torch.Generator().manual_seed(0)
    measured = []
    for _ in range(400):
        kl = 0.02 / coefficient * (1 + 0.1 * torch.randn(1, generator=noise).item())
        coefficient = adapted_coefficient(coefficient, kl, target=0.1, horizon=1000, num_episodes=512)
        measured.append(kl)
    assert sum(measured[-100:]) / 100 == pytest.approx(0.1, rel=0.05)
    assert coefficient == pytest.approx(0.2, rel=0.1)


def test_a_divergence_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="kl=nan"):
        adapted_coefficient(1.0, math.nan, target=0.1, horizon=1000, num_episodes=1)
