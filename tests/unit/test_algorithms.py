"""Values worked by hand, naive twins, gradients and invariances of the mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leaderless.algorithms import (
    Aggregation,
    Denominators,
    clipped_policy_loss,
    count_groups_without_signal,
    grpo_advantages,
    k3_penalty,
    majority_is_correct,
    pass_at_k,
    repeat_per_token,
    segment_sum,
    token_weights,
)

AGGREGATIONS: tuple[Aggregation, ...] = ("sequence_mean_token_mean", "token_mean")


def advantages(rewards: Tensor, groups: Tensor, valid: Tensor | None = None, *, normalize: bool = True) -> Tensor:
    valid = torch.ones(len(rewards), dtype=torch.bool) if valid is None else valid
    return grpo_advantages(rewards, valid, groups, normalize_by_std=normalize, epsilon=1e-6)


def naive_grpo(rewards: list[float], valid: list[bool], groups: list[int], *, normalize: bool) -> list[float]:
    """One sample at a time, in double precision."""
    result = []
    for reward, is_valid, group in zip(rewards, valid, groups, strict=True):
        others = [r for r, v, g in zip(rewards, valid, groups, strict=True) if v and g == group]
        if not is_valid or len(others) < 2 or max(others) == min(others):
            result.append(0.0)
            continue
        mean = sum(others) / len(others)
        std = math.sqrt(sum((r - mean) ** 2 for r in others) / (len(others) - 1))
        result.append((reward - mean) / (std + 1e-6) if normalize else reward - mean)
    return result


def test_grpo_advantages_worked_by_hand() -> None:
    # Rewards 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, so the deviation is 1/2.
    result = advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(result, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


def test_grpo_without_normalisation_only_subtracts_the_mean() -> None:
    result = advantages(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([7, 7, 7]), normalize=False)
    torch.testing.assert_close(result, torch.tensor([-1 / 3, -4 / 3, 5 / 3]))


@given(
    rows=st.lists(st.tuples(st.floats(-5, 5, width=32), st.booleans(), st.integers(0, 4)), min_size=1, max_size=24),
    normalize=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_grpo_advantages_equal_a_naive_loop_in_any_order(
    rows: list[tuple[float, bool, int]], normalize: bool, seed: int
) -> None:
    rewards, valid, groups = (list(part) for part in zip(*rows, strict=True))
    expected = torch.tensor(naive_grpo(rewards, valid, groups, normalize=normalize))
    # What a failed reward holds must not matter, whatever it is.
    held = torch.tensor([r if v else math.nan for r, v in zip(rewards, valid, strict=True)])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    result = advantages(held[order], torch.tensor(groups)[order], torch.tensor(valid)[order], normalize=normalize)
    torch.testing.assert_close(result, expected[order].float(), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e30])
def test_equal_rewards_have_no_signal(reward: float) -> None:
    assert not advantages(torch.full((5,), reward), torch.zeros(5, dtype=torch.int64)).any()


def test_a_group_with_fewer_than_two_valid_rewards_has_no_signal() -> None:
    rewards, groups = torch.tensor([1.0, math.nan, math.nan, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    valid = torch.tensor([True, False, False, True, True])
    result = advantages(rewards, groups, valid)
    assert result[:3].tolist() == [0, 0, 0]
    assert result[3] > 0 > result[4]
    assert count_groups_without_signal(result, groups) == (1, 2)


def test_no_samples_give_no_advantages() -> None:
    assert advantages(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)
    assert count_groups_without_signal(torch.empty(0), torch.empty(0, dtype=torch.int64)) == (0, 0)


def test_bfloat16_rewards_are_normalised_in_double_precision() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.bfloat16)
    result = advantages(rewards, torch.zeros(4, dtype=torch.int64))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


def test_clipped_loss_worked_by_hand() -> None:
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    gain = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0])
    result = clipped_policy_loss(ratio.log(), torch.zeros(5), gain, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(result.loss, torch.tensor([-2.0, -2.6, 3.0, -1.0, 1.6]))
    assert result.is_clipped.tolist() == [False, True, False, False, True]


def naive_clipped_loss(log_prob: float, old: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(min(20.0, max(-20.0, log_prob - old)))
    clipped = min(1 + high, max(1 - low, ratio))
    return -min(ratio * advantage, clipped * advantage)


@given(
    values=st.lists(st.tuples(*[st.floats(-4, 0)] * 2, st.floats(-3, 3)), min_size=1, max_size=20),
    low=st.floats(0.01, 0.9),
    high=st.floats(0.01, 2),
)
@settings(max_examples=200, deadline=None)
def test_clipped_loss_equals_a_naive_loop(values: list[tuple[float, float, float]], low: float, high: float) -> None:
    new, old, gain = (torch.tensor(part, dtype=torch.float64) for part in zip(*values, strict=True))
    result = clipped_policy_loss(new, old, gain, clip_low=low, clip_high=high).loss
    expected = torch.tensor([naive_clipped_loss(*value, low, high) for value in values], dtype=torch.float64)
    torch.testing.assert_close(result, expected)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "clipped": lambda new, old, gain: clipped_policy_loss(new, old, gain, clip_low=0.2, clip_high=0.3).loss,
    "k3": lambda new, old, gain: k3_penalty(new, old) + 0.0 * gain,
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    new = torch.randn(40, dtype=torch.float64, generator=generator, requires_grad=True)
    old = new.detach() + 0.4 * torch.randn(40, dtype=torch.float64, generator=generator)
    gain = torch.randn(40, dtype=torch.float64, generator=generator)
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, old, gain), new)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_ratios_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    new = torch.tensor([-1e4, -1e4, 0.0, 0.0, -200.0, 1e4], dtype=dtype, requires_grad=True)
    old = torch.tensor([0.0, 1e4, -1e4, -1e30, 0.0, 0.0], dtype=dtype)
    loss = LOSSES[name](new, old, torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, -1.0], dtype=dtype))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert new.grad is not None
    assert new.grad.isfinite().all()


def test_the_clipped_loss_on_policy_has_the_gradient_of_reinforce() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.randn(30, generator=generator, requires_grad=True)
    gain = torch.randn(30, generator=generator)
    loss = clipped_policy_loss(log_probs, log_probs.detach(), gain, clip_low=0.2, clip_high=0.2).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    torch.testing.assert_close(gradient, -gain)


def test_k3_worked_by_hand_and_never_negative() -> None:
    log_probs, ref = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, -2.0, -1.0])
    torch.testing.assert_close(k3_penalty(log_probs, ref), torch.tensor([0.0, math.exp(-1), math.e - 2]))
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    assert (k3_penalty(torch.zeros(1000), noise) >= 0).all()


def test_k3_estimates_the_kl_divergence_without_bias() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    expected = (policy * (policy / reference).log()).sum()
    estimate = (policy * k3_penalty(policy.log(), reference.log())).sum()
    torch.testing.assert_close(estimate, expected)


def test_token_weights_worked_by_hand() -> None:
    lengths, valid = torch.tensor([2, 0, 4, 3]), torch.tensor([True, True, True, False])
    totals = Denominators(*Denominators.count(lengths, valid).tolist())
    assert totals == Denominators(num_samples=2, num_tokens=6)
    per_sequence = token_weights("sequence_mean_token_mean", lengths, valid, totals)
    torch.testing.assert_close(per_sequence, torch.tensor([1 / 4] * 2 + [1 / 8] * 4 + [0.0] * 3))
    per_token = token_weights("token_mean", lengths, valid, totals)
    torch.testing.assert_close(per_token, torch.tensor([1 / 6] * 6 + [0.0] * 3))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(
    samples=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=16),
    parts=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_the_aggregated_loss_does_not_depend_on_order_or_on_how_it_is_split(
    aggregation: Aggregation, samples: list[tuple[int, bool]], parts: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths, valid = (torch.tensor(part) for part in zip(*samples, strict=True))
    losses = [torch.randn(length, dtype=torch.float64, generator=generator) for length, _ in samples]
    means = [loss.mean() for loss, (length, ok) in zip(losses, samples, strict=True) if length and ok]
    tokens = [loss for loss, (_, ok) in zip(losses, samples, strict=True) if ok and len(loss)]
    expected = torch.tensor(0.0, dtype=torch.float64)
    if means:
        expected = torch.stack(means).mean() if aggregation != "token_mean" else torch.cat(tokens).mean()

    order = torch.randperm(len(samples), generator=generator)
    pieces = torch.tensor_split(order, parts)
    counts = torch.stack([Denominators.count(lengths[piece], valid[piece]) for piece in pieces]).sum(0)
    totals = Denominators(*counts.tolist())
    result = torch.tensor(0.0, dtype=torch.float64)
    for piece in pieces:
        weights = token_weights(aggregation, lengths[piece], valid[piece], totals)
        values = torch.cat([torch.empty(0, dtype=torch.float64), *(losses[i] for i in piece.tolist())])
        result = result + (weights.double() * values).sum()
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


def test_segments_without_tokens_count_as_zero() -> None:
    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 0, 1])
    assert segment_sum(values, lengths).tolist() == [0, 3, 0, 3]
    assert repeat_per_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), lengths).tolist() == [2, 2, 4]


def test_pass_at_k_is_the_chance_over_all_choices() -> None:
    from itertools import combinations

    for num_correct in range(6):
        outcomes = [i < num_correct for i in range(5)]
        for k in range(1, 6):
            chosen = list(combinations(outcomes, k))
            expected = sum(any(choice) for choice in chosen) / len(chosen)
            assert pass_at_k(5, num_correct, k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="k=6: must be between 1 and the 5"):
        pass_at_k(5, 1, 6)


def test_the_majority_votes_among_responses_that_have_an_answer() -> None:
    assert majority_is_correct(["4", "5", "4"], [True, False, True])
    assert not majority_is_correct(["4", "5", "5"], [True, False, False])
    assert majority_is_correct([None, None, "4"], [False, False, True])
    assert majority_is_correct(["4", "5"], [True, False]), "of equally frequent answers the first counts"
    assert not majority_is_correct([None, None], [False, False])
