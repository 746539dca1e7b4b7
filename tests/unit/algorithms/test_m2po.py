"""The tokens that M2PO masks: by hand, compared with the paper's loop, over ranks, and what they change."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.algorithms.naive import loss_of, packed, random_batch
from torch import Tensor

from leaderless.algorithms import ChoiceInputs
from leaderless.algorithms.losses.m2po import M2poLoss, largest_within

ROUNDS = 8


def masked(loss: M2poLoss, log_ratio: Tensor, gain: Tensor) -> list[bool]:
    noise, columns = torch.zeros_like(gain), {"rollout_log_probs": -log_ratio}
    return loss.choose(ChoiceInputs(torch.zeros_like(gain), gain, noise, lambda own: own, columns)).tolist()


def test_the_mask_worked_by_hand() -> None:
    # Tokens 0, 1, 3 and 4 would lead further away, with squares 0.01, 0.09, 0.16 and 0.04: a mean of 0.075. Without
    # 0.16 it is 0.0467, without 0.09 it is 0.025. Tokens 2 and 5 return, and token 6 has no advantage.
    log_ratio = torch.tensor([0.1, 0.3, -0.05, -0.4, -0.2, 0.02, 5.0])
    gain = torch.tensor([1.0, 0.5, 1.0, -1.0, -2.0, -1.0, 0.0])
    for threshold, chosen in ((0.08, []), (0.05, [3]), (0.04, [1, 3]), (0.02, [1, 3, 4]), (0.001, [0, 1, 3, 4])):
        expected = [token in chosen for token in range(7)]
        assert masked(M2poLoss(threshold=threshold), log_ratio, gain) == expected


def naive_limit(values: list[float], bound: float) -> float:
    """The paper's loop, in exact arithmetic: the largest value goes until the mean of the others is low enough."""
    kept = sorted(map(Fraction, values))
    while kept and sum(kept) > Fraction(bound) * len(kept):
        kept = [value for value in kept if value < kept[-1]]  # equal ones go together
    return float(kept[-1]) if kept else -1.0


values = st.one_of(
    st.lists(st.floats(0, 1e6), max_size=40),
    st.lists(st.sampled_from([0.0, 0.01, 0.04, 0.1, 0.75, 400.0]), max_size=40),  # equal ones
    st.lists(st.floats(1, 1 + 1e-12), max_size=10),
)


@given(drawn=values, bound=st.floats(1e-6, 1e3), seed=st.integers(0, 9), world_size=st.sampled_from([1, 2, 4]))
def test_the_limit_keeps_what_the_paper_keeps_on_any_number_of_ranks(
    drawn: list[float], bound: float, seed: int, world_size: int
) -> None:
    everything = torch.tensor(drawn, dtype=torch.float64)
    sums: list[Tensor] = []
    limit = largest_within(everything, bound, lambda own: (sums.append(own), own)[1])
    # On the border, where rounding decides, both answers are right.
    around = {naive_limit(drawn, bound * factor) for factor in (1 - 1e-12, 1.0, 1 + 1e-12)}
    assert max((value for value in drawn if value <= limit), default=-1.0) in around
    owner = torch.randint(0, world_size, (len(drawn),), generator=torch.Generator().manual_seed(seed))
    calls: list[list[Tensor]] = []
    for rank in range(world_size):
        own_sums: list[Tensor] = []

        def reduced(own: Tensor, own_sums: list[Tensor] = own_sums) -> Tensor:
            own_sums.append(own)
            return sums[len(own_sums) - 1]

        assert largest_within(everything[owner == rank], bound, reduced) == limit
        calls.append(own_sums)
    assert {len(own_sums) for own_sums in calls} == {ROUNDS}, "ranks must reduce equally often"
    for total, *parts in zip(sums, *calls, strict=True):
        torch.testing.assert_close(torch.stack(parts).sum(0), total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_on_both_sides_of_the_limit_are_told_apart_however_close_they_are(dtype: torch.dtype) -> None:
    low = torch.tensor(0.04, dtype=dtype)
    high = torch.nextafter(low, torch.ones_like(low))
    limit = largest_within(torch.stack([low, high]), float(low), lambda own: own)
    assert float(low) <= limit < float(high)


def test_a_limit_on_the_mean_of_many_values_is_exact() -> None:
    noise = torch.Generator().manual_seed(0)
    many = torch.randn(50_000, generator=noise).double().square() ** 2
    limit = largest_within(many, 0.04, lambda own: own)
    kept = many[many <= limit]
    following = torch.cat([kept, many[many > limit].min()[None]])
    assert float(kept.mean()) <= 0.04 < float(following.mean())


def test_no_tokens_and_small_log_ratios_mask_nothing() -> None:
    assert largest_within(torch.empty(0), 0.04, lambda own: own) == math.inf
    assert largest_within(torch.zeros(5), 0.04, lambda own: own) == math.inf
    assert masked(M2poLoss(), torch.full((4,), 0.19), torch.ones(4)) == [False] * 4


def test_a_masked_token_has_neither_loss_nor_gradient_and_the_others_those_of_the_ratio() -> None:
    new, old, gain, _ = packed(random_batch(0, [30], is_per_response=False))
    new.requires_grad_()
    is_chosen = torch.arange(30) % 3 == 0
    result = loss_of(M2poLoss(), new, old, gain, is_chosen=is_chosen)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    expected = torch.where(is_chosen, 0.0, -(new - old).detach().exp() * gain)
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(gradient, expected)
    assert torch.equal(result.is_clipped, is_chosen)
    torch.testing.assert_close(result.metrics["second_moment"], (new - old).detach().square())
