"""The tokens chosen by Clip-Cov and KL-Cov, agreed on by ranks that exchange only counts, and their effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.algorithms.naive import loss_of, packed, random_batch
from torch import Tensor

from leaderless.algorithms import ChoiceInputs, covariances
from leaderless.algorithms.losses.clip_cov import ClipCovLoss
from leaderless.algorithms.losses.kl_cov import KlCovLoss, threshold_of_top
from leaderless.algorithms.losses.ppo import PpoLoss
from leaderless.algorithms.losses.reinforce import ReinforceLoss

ROUNDS = 8


def test_covariances_worked_by_hand() -> None:
    # Means -2 and 1: (-1 + 2)(3 - 1), (-2 + 2)(1 - 1), (-3 + 2)(-1 - 1).
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    result = covariances(log_probs, torch.tensor([3.0, 1.0, -1.0]), mean_log_prob=-2.0, mean_advantage=1.0)
    assert result.tolist() == [2, 0, 2]
    assert not result.requires_grad
    half = covariances(log_probs.bfloat16(), torch.tensor([3.0, 1.0, -1.0]), mean_log_prob=-2.001, mean_advantage=1.0)
    torch.testing.assert_close(half, torch.tensor([2.002, 0.0, 1.998]))


@given(st.lists(st.tuples(st.floats(-9, 0), st.floats(-3, 3)), min_size=2, max_size=20))
def test_covariances_sum_to_the_covariance(pairs: list[tuple[float, float]]) -> None:
    columns = torch.tensor(pairs, dtype=torch.float64)
    means = columns.mean(0).tolist()
    result = covariances(columns[:, 0], columns[:, 1], mean_log_prob=means[0], mean_advantage=means[1])
    naive = [(p - means[0]) * (a - means[1]) for p, a in pairs]
    torch.testing.assert_close(result, torch.tensor(naive, dtype=torch.float64))
    torch.testing.assert_close(result.mean(), columns.T.cov(correction=0)[0, 1])


def test_the_choice_for_clip_cov_worked_by_hand() -> None:
    # Means -1.75 and 1.5; the covariances 1.125, 3.125, 0.125 and 1.125, of which all but the third are in range.
    # Of 4 tokens, 4 times the fraction are wanted among the 3.
    log_probs, gain = torch.tensor([-1.0, -3.0, -2.0, -1.0]), torch.tensor([3.0, -1.0, 1.0, 3.0])
    inputs = ChoiceInputs(log_probs, gain, torch.tensor([0.1, 0.5, 0.1, 0.49]), lambda own: own)
    for fraction, chosen in (
        (0.375, [True, False, False, True]),
        (1e-9, [False] * 4),
        (0.9, [True, True, False, True]),
    ):
        assert ClipCovLoss(fraction=fraction, lowest=1.0, highest=5.0).choose(inputs).tolist() == chosen


def test_clip_cov_chooses_the_number_it_wants_on_average() -> None:
    noise = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    # Each fourth token is 1 above both means or 1 below them, so that its covariance is 1; all others have 0.
    place = torch.arange(100_000)
    gain = torch.where(place % 4 == 0, torch.where(place % 8 == 0, 1.0, -1.0), 0.0)
    inputs = ChoiceInputs(gain - 2, gain, noise, lambda own: own)
    chosen = ClipCovLoss(fraction=0.02, lowest=0.5, highest=2.0).choose(inputs)
    assert chosen.sum().item() == pytest.approx(2000, abs=4 * 2000**0.5)


@contextmanager
def ranks_that_sum(parts: list[Tensor], count: int, highest: float) -> Iterator[list[float]]:
    """The threshold that each rank finds, with all ranks in step: what they reduce is summed over the parts."""
    rank_calls = [[] for _ in parts]
    # Every rank sees the same sums, so one rank's search over the counts of all parts stands for each of them.
    totals: list[Tensor] = []

    def first(thresholds_above: Tensor) -> Tensor:
        totals.append(thresholds_above)
        return thresholds_above

    whole = threshold_of_top(torch.cat(parts), count, first, highest)
    found = []
    for rank, part in enumerate(parts):

        def replay(own: Tensor, rank: int = rank) -> Tensor:
            rank_calls[rank].append(own)
            return totals[len(rank_calls[rank]) - 1]

        found.append(threshold_of_top(part, count, replay, highest))
    for call, total in enumerate(totals):
        torch.testing.assert_close(sum(calls[call] for calls in rank_calls), total)
    assert {len(calls) for calls in rank_calls} == {ROUNDS}, "ranks must reduce equally often"
    assert set(found) == {whole}
    yield found


values = st.one_of(
    st.lists(st.floats(-1e4, 1e4, width=32), max_size=40),
    st.lists(st.sampled_from([-3.0, -1e-3, 0.0, 0.1, 0.7, 7e3]), max_size=40),  # ties
    st.lists(st.floats(-1e4, -1, width=32), max_size=20),  # none above 0
)


@given(drawn=values, count=st.integers(0, 45), seed=st.integers(0, 9), world_size=st.sampled_from([1, 2, 4]))
def test_the_threshold_takes_what_a_sort_would_take(drawn: list[float], count: int, seed: int, world_size: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    everything = torch.tensor(drawn)
    parts = [everything[torch.randint(0, world_size, (len(drawn),), generator=noise) == r] for r in range(world_size)]
    parts = parts if world_size > 1 else [everything]
    # Each value once or never: with a random split the parts need not hold each value, so sort what they hold.
    held = torch.cat(parts).sort(descending=True).values
    highest = float(everything.abs().max()) if len(drawn) else 0.0
    with ranks_that_sum(parts, count, highest) as thresholds:
        num_taken = int((held >= thresholds[0]).sum())
    assert num_taken <= count
    if num_taken < min(count, len(held)):  # only if the next value is tied with more than may be taken
        next_value = held[num_taken]
        num_tied = int((held - next_value).abs().le(highest * 2**-46).sum())
        assert num_taken + num_tied > count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.1, 0.0, -0.7, 3e4])
def test_equal_values_are_taken_all_or_not_at_all(value: float, dtype: torch.dtype) -> None:
    # A comparison rounds the threshold to the values' own precision: it must not fall on a value.
    equal = torch.full((10,), value, dtype=dtype)
    for highest in (float(equal.abs().max()), 1e5):
        for count, taken in ((0, 0), (9, 0), (10, 10), (11, 10)):
            threshold = threshold_of_top(equal, count, lambda own: own, highest)
            assert int((equal >= threshold).sum()) == taken


def test_the_threshold_of_one_in_a_thousand_of_many_tokens_is_exact() -> None:
    noise = torch.Generator().manual_seed(0)
    many = torch.randn(50_000, generator=noise) ** 3
    threshold = threshold_of_top(many, 50, lambda own: own, float(many.abs().sum()))
    assert int((many >= threshold).sum()) == 50


def settings() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, old, gain, _ = packed(random_batch(0, [30], is_per_response=False))
    return new.requires_grad_(), old, gain, torch.arange(30) % 3 == 0


def test_clip_cov_is_the_clipped_loss_without_gradient_at_chosen_tokens() -> None:
    new, old, gain, is_chosen = settings()
    plain = loss_of(PpoLoss(clip_low=0.2, clip_high=0.3), new, old, gain)
    (expected,) = torch.autograd.grad(plain.loss.sum(), new)
    result = loss_of(ClipCovLoss(clip_low=0.2, clip_high=0.3), new, old, gain, is_chosen=is_chosen)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    torch.testing.assert_close(result.loss, plain.loss)
    torch.testing.assert_close(gradient, expected.masked_fill(is_chosen, 0.0))
    torch.testing.assert_close(result.is_clipped, plain.is_clipped | is_chosen)


def test_kl_cov_worked_by_hand() -> None:
    # Ratio 2 and 1/2, A = 1: -2 + 0.5 log 2 where chosen, -1/2 where not. Gradients: -2 + 0.5, -1/2.
    new = torch.tensor([2.0, 0.5]).log().requires_grad_()
    result = loss_of(
        KlCovLoss(coefficient=0.5), new, torch.zeros(2), torch.ones(2), is_chosen=torch.tensor([True, False])
    )
    torch.testing.assert_close(result.loss, torch.tensor([-2 + 0.5 * torch.tensor(2.0).log().item(), -0.5]))
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    torch.testing.assert_close(gradient, torch.tensor([-1.5, -0.5]))
    assert result.is_clipped.tolist() == [True, False]


def test_a_chosen_token_far_from_the_old_policy_is_still_pulled_back() -> None:
    new = torch.tensor([-50.0, 50.0], requires_grad=True)
    loss = loss_of(
        KlCovLoss(coefficient=0.5), new, torch.zeros(2), torch.zeros(2), is_chosen=torch.tensor([True, True])
    ).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("chooses", [False, True])
def test_on_policy_both_have_the_gradient_of_reinforce_at_tokens_not_chosen(chooses: bool) -> None:
    new, _, gain, is_chosen = settings()
    is_chosen = is_chosen & chooses
    (expected,) = torch.autograd.grad(loss_of(ReinforceLoss(), new, new, gain).loss.sum(), new)
    old = new.detach()
    clip_cov = loss_of(ClipCovLoss(clip_low=0.2, clip_high=0.2), new, old, gain, is_chosen=is_chosen)
    (gradient,) = torch.autograd.grad(clip_cov.loss.sum(), new)
    torch.testing.assert_close(gradient, expected.masked_fill(is_chosen, 0.0))
    kl_cov = loss_of(KlCovLoss(coefficient=1.0), new, old, gain, is_chosen=is_chosen)
    (gradient,) = torch.autograd.grad(kl_cov.loss.sum(), new)
    torch.testing.assert_close(gradient, expected)
