"""Losses of whole responses, compared with the form in their papers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from tests.unit.algorithms.naive import Token, loss_of, packed, random_batch, responses, with_one_advantage
from torch import Tensor

from leaderless.algorithms import Denominators, token_weights
from leaderless.algorithms.losses.gmpo import GmpoLoss
from leaderless.algorithms.losses.gspo import GspoLoss


def response_mean(losses: Tensor, lengths: Tensor) -> Tensor:
    """1/G times the sum over responses of 1/|y| times the sum over tokens, as in both papers."""
    is_valid = torch.ones(len(lengths), dtype=torch.bool)
    totals = Denominators(*Denominators.count(lengths, is_valid).tolist())
    return (token_weights("sequence_mean_token_mean", lengths, is_valid, totals) * losses).sum()


def gspo_equation_5(new: Tensor, old: Tensor, gain: Tensor, lengths: Tensor, low: float, high: float) -> Tensor:
    """The loss of GSPO with one advantage and one ratio per response, differentiated directly."""
    terms = []
    parts = (column.split(lengths.tolist()) for column in (new, old, gain))
    for new_part, old_part, gain_part in zip(*parts, strict=True):
        if len(new_part):
            s = (new_part - old_part).mean().exp()
            terms.append(-torch.minimum(s * gain_part[0], s.clamp(1 - low, 1 + high) * gain_part[0]))
    return torch.stack(terms).mean()


def test_gspo_worked_by_hand() -> None:
    # Log-ratios log 2 and log 8: s = exp(log(16) / 2) = 4, clipped at 1.5 for A = 2, but not for A = -2.
    new, lengths = torch.tensor([2.0, 8.0, 2.0, 8.0]).log(), torch.tensor([2, 2])
    gain = torch.tensor([2.0, 2.0, -2.0, -2.0])
    result = loss_of(GspoLoss(clip_low=0.5, clip_high=0.5), new, torch.zeros(4), gain, lengths)
    torch.testing.assert_close(result.loss, torch.tensor([-3.0, -3.0, 8.0, 8.0]))
    assert result.is_clipped.tolist() == [True, True, False, False]


def test_gmpo_worked_by_hand() -> None:
    # A > 0: 8 is cut to 2, so sqrt(2 * 2) = 2. A < 0: the ratios 1/8 and 2, of which 1/8 is cut to 1/2: sqrt(1/2 * 2).
    new, lengths = torch.tensor([2.0, 8.0, 0.125, 2.0]).log(), torch.tensor([2, 2])
    gain = torch.tensor([3.0, 3.0, -3.0, -3.0])
    result = loss_of(GmpoLoss(clip_low=math.log(2), clip_high=math.log(2)), new, torch.zeros(4), gain, lengths)
    torch.testing.assert_close(result.loss, torch.tensor([-6.0, -6.0, 3.0, 3.0]))
    assert result.is_clipped.tolist() == [False, True, True, False]


def test_gmpo_cuts_bad_responses_at_its_lower_bound() -> None:
    # A < 0 and ratio 1/8: at least 1/4, whatever the upper bound is.
    result = loss_of(
        GmpoLoss(clip_low=math.log(4), clip_high=math.log(2)),
        torch.tensor([0.125]).log(),
        torch.zeros(1),
        -torch.ones(1),
        torch.tensor([1]),
    )
    torch.testing.assert_close(result.loss, torch.tensor([0.25]))


@given(batch=responses)
def test_gspo_has_value_and_gradient_of_equation_5_where_advantages_are_per_response(batch: list[list[Token]]) -> None:
    batch = [with_one_advantage(response) for response in batch if response]
    if not batch:
        return
    new, old, gain, lengths = packed(batch)
    new.requires_grad_()
    token_form = response_mean(loss_of(GspoLoss(clip_low=0.1, clip_high=0.2), new, old, gain, lengths).loss, lengths)
    sequence_form = gspo_equation_5(new, old, gain, lengths, 0.1, 0.2)
    torch.testing.assert_close(token_form, sequence_form)
    ours, theirs = (torch.autograd.grad(loss, new)[0] for loss in (token_form, sequence_form))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_equation_5_agrees_with_finite_differences(seed: int) -> None:
    new, old, gain, lengths = packed(random_batch(seed, [4, 1, 6, 3], is_per_response=True))
    new.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gspo_equation_5(x, old, gain, lengths, 0.1, 0.2), new)


def test_gspo_tells_ratios_apart_that_a_clip_of_3e_4_needs_in_float32() -> None:
    # Log-ratios of 1, 2 and 2 times 2^-10 of tokens with log-probs near -1000, where float32 has steps of 2^-14.
    old = torch.full((3,), -1000.0)
    new = (old + torch.tensor([1.0, 2.0, 2.0]) * 2**-10).requires_grad_()
    loss = loss_of(GspoLoss(clip_low=0.5, clip_high=0.5), new, old, torch.ones(3), torch.tensor([3])).loss
    expected = torch.full((3,), -math.exp(5 / 3 * 2**-10))
    torch.testing.assert_close(loss, expected, rtol=2e-7, atol=0)


def test_the_gradient_of_gmpo_is_shared_by_the_tokens_that_are_not_cut() -> None:
    # Loss -sqrt(r1 r2) A for both tokens; their sum -2 sqrt(r1 r2) A has slope -sqrt(r1 r2) A in each log r.
    new = torch.tensor([2.0, 8.0], dtype=torch.float64).log().requires_grad_()
    for high, expected in ((math.log(100), [-4.0, -4.0]), (math.log(4), [-math.sqrt(8), 0.0])):
        loss = loss_of(
            GmpoLoss(clip_low=1.0, clip_high=high), new, torch.zeros(2), torch.ones(2), torch.tensor([2])
        ).loss
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


def test_a_thousand_tokens_are_averaged_in_bfloat16_too() -> None:
    # 1000 log-ratios of 1/64; bfloat16 sums of them stop growing at 4.
    new, old = torch.full((1000,), 0.015625, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16)
    loss = loss_of(GspoLoss(clip_low=0.5, clip_high=0.5), new, old, torch.ones(1000), torch.tensor([1000])).loss
    torch.testing.assert_close(loss, torch.full((1000,), -math.exp(1 / 64)))
