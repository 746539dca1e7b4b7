"""Importance weights between the engine that sampled and the trainer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.algorithms.naive import Token, loss_of, packed, random_batch, responses
from torch import Tensor

from leaderless.algorithms import CorrectionLevel, importance_ratios, is_within, masked_weights, truncated_weights
from leaderless.algorithms.losses.ppo import PpoLoss

LEVELS: tuple[CorrectionLevel, ...] = ("token", "sequence", "geometric")


def naive_ratios(response: list[Token], level: CorrectionLevel) -> list[float]:
    ratios = [math.exp(old - rollout) for old, rollout, _ in response]
    if level == "token":
        return ratios
    product = math.prod(ratios)
    return [product if level == "sequence" else product ** (1 / len(response))] * len(response)


def test_ratios_worked_by_hand() -> None:
    # Ratios 2 and 8 of one response: product 16, geometric mean 4; and 0.5 of another, behind an empty one.
    old, lengths = torch.tensor([2.0, 8.0, 0.5]).log(), torch.tensor([2, 0, 1])
    expected = {"token": [2.0, 8.0, 0.5], "sequence": [16.0, 16.0, 0.5], "geometric": [4.0, 4.0, 0.5]}
    for level in LEVELS:
        result = importance_ratios(old, torch.zeros(3), lengths, level)
        torch.testing.assert_close(result, torch.tensor(expected[level]))


@pytest.mark.parametrize("level", LEVELS)
@given(batch=responses)
def test_ratios_equal_a_naive_loop(level: CorrectionLevel, batch: list[list[Token]]) -> None:
    old, rollout, _, lengths = packed(batch)
    expected = [ratio for response in batch if response for ratio in naive_ratios(response, level)]
    result = importance_ratios(old, rollout, lengths, level)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


@given(ratios=st.lists(st.floats(0, 9), max_size=9), lowest=st.floats(0, 2), width=st.floats(0, 5))
def test_weights_equal_a_naive_loop(ratios: list[float], lowest: float, width: float) -> None:
    highest, tensor = lowest + width, torch.tensor(ratios, dtype=torch.float64)
    assert truncated_weights(tensor, highest=highest).tolist() == [min(w, highest) for w in ratios]
    masked = [w if lowest <= w <= highest else 0.0 for w in ratios]
    assert masked_weights(tensor, lowest=lowest, highest=highest).tolist() == masked
    assert is_within(tensor, lowest, highest).tolist() == [lowest <= w <= highest for w in ratios]


def test_weights_worked_by_hand() -> None:
    ratios = torch.tensor([0.25, 0.5, 1.0, 2.0, 3.0])
    assert truncated_weights(ratios, highest=2.0).tolist() == [0.25, 0.5, 1.0, 2.0, 2.0]
    assert masked_weights(ratios, lowest=0.5, highest=2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert is_within(ratios, 0.5, 2.0).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_have_weight_1(level: CorrectionLevel) -> None:
    log_probs = -torch.rand(7, generator=torch.Generator().manual_seed(0)) * 100
    assert importance_ratios(log_probs, log_probs, torch.tensor([3, 0, 4]), level).tolist() == [1.0] * 7


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_ratios_give_finite_weights(level: CorrectionLevel, dtype: torch.dtype) -> None:
    old = torch.tensor([-1e4, 0.0, 0.0, -1e4], dtype=dtype)
    rollout = torch.tensor([0.0, -1e4, 0.0, -1e4], dtype=dtype)
    for lengths in ([4], [1, 1, 1, 1], [2, 0, 2]):
        ratios = importance_ratios(old, rollout, torch.tensor(lengths), level)
        assert ratios.isfinite().all()
        assert ratios.dtype == torch.float32
        assert (truncated_weights(ratios, highest=2.0) <= 2).all()
        assert (masked_weights(ratios, lowest=0.5, highest=2.0) <= 2).all()


@pytest.mark.parametrize("level", LEVELS)
def test_weights_have_no_gradient(level: CorrectionLevel) -> None:
    old = torch.zeros(3, requires_grad=True)
    assert not importance_ratios(old, torch.zeros(3), torch.tensor([2, 1]), level).requires_grad


def test_a_bfloat16_response_of_a_thousand_tokens_is_summed_in_float32() -> None:
    # 1000 log-ratios of 1/64 make e^15.6; in bfloat16 their sum would stop growing at 4.
    old = torch.full((1000,), 0.015625, dtype=torch.bfloat16)
    result = importance_ratios(old, torch.zeros_like(old), torch.tensor([1000]), "sequence")
    torch.testing.assert_close(result, torch.full((1000,), math.exp(15.625)), rtol=1e-4, atol=0)


def policies(seed: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the trainer and the engine for responses of two tokens out of three, [9, 2]."""
    noise = torch.Generator().manual_seed(seed)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    tables = [torch.randn(2, 3, dtype=torch.float64, generator=noise).log_softmax(1) for _ in range(2)]
    return tuple(torch.stack([table[0][pairs[:, 0]], table[1][pairs[:, 1]]], dim=1) for table in tables)


@pytest.mark.parametrize("seed", range(3))
def test_the_weights_of_responses_turn_the_engines_mean_into_the_trainers(seed: int) -> None:
    old, rollout = policies(seed)
    rewards = torch.arange(9, dtype=torch.float64).square()
    lengths = torch.full((9,), 2)
    weights = importance_ratios(old.reshape(-1), rollout.reshape(-1), lengths, "sequence").reshape(9, 2)
    assert torch.equal(weights[:, 0], weights[:, 1])
    corrected = (rollout.sum(1).exp() * weights[:, 0] * rewards).sum()
    torch.testing.assert_close(corrected, (old.sum(1).exp() * rewards).sum())


def test_decoupled_ppo_has_the_gradient_of_its_objective() -> None:
    # AReaL's: (p_prox / p_behave) min(u A, clip(u) A) with u = p / p_prox; no gradient through the first ratio.
    new, prox, gain, lengths = packed(random_batch(2, [8, 0, 6], is_per_response=False))
    behave = prox + 0.3 * torch.randn(14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    new.requires_grad_()
    weights = importance_ratios(prox, behave, lengths, "token")
    ours = weights * loss_of(PpoLoss(clip_low=0.2, clip_high=0.2), new, prox, gain).loss
    u = (new - prox).exp()
    theirs = -(prox - behave).exp() * torch.minimum(u * gain, u.clamp(0.8, 1.2) * gain)
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss.sum(), new)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[3, 1], [0, 2]], [[2], [0], [3], [1]]])
def test_weights_do_not_depend_on_order_or_on_how_samples_are_split(
    level: CorrectionLevel, split: list[list[int]]
) -> None:
    batch = random_batch(4, [3, 0, 5, 1], is_per_response=False)

    def weights(rows: list[int]) -> Tensor:
        old, rollout, _, lengths = packed([batch[row] for row in rows])
        return importance_ratios(old, rollout, lengths, level)

    expected = weights([0, 1, 2, 3]).split([3, 0, 5, 1])
    for rows in split:
        torch.testing.assert_close(weights(rows), torch.cat([expected[row] for row in rows]))
