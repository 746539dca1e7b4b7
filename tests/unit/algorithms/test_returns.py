"""Rewards and advantages along a response: by hand, compared with loops over each token, and their identities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leaderless.algorithms import (
    AdvantageInputs,
    add_to_last,
    decayed_sum,
    overlong_penalty,
    pack,
    repeat_per_token,
    segment_mean,
    segment_sum,
    token_level_rewards,
    unpack,
)
from leaderless.algorithms.advantages.gae import GaeAdvantage, gae_advantages, length_adaptive_decay

samples = st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), max_size=6), min_size=1, max_size=6)
shares = st.floats(0, 1)


def packed(batch: list[list[tuple[float, float]]]) -> tuple[Tensor, Tensor, Tensor]:
    columns = torch.tensor([pair for sample in batch for pair in sample], dtype=torch.float64).reshape(-1, 2)
    return columns[:, 0], columns[:, 1], torch.tensor([len(sample) for sample in batch])


def naive_gae(rewards: list[float], values: list[float], discount: float, decay: float) -> list[float]:
    """The definition: a sum over all later surprises, discounted by their distance."""
    behind = [*values[1:], 0.0]
    surprises = [r + discount * after - v for r, v, after in zip(rewards, values, behind, strict=True)]
    return [
        sum((discount * decay) ** (later - t) * surprises[later] for later in range(t, len(surprises)))
        for t in range(len(surprises))
    ]


def test_gae_worked_by_hand() -> None:
    # Rewards 0, 1; values 0.5, 0.25; discount 0.5, decay 0.5. d1 = 1 - 0.25 = 0.75, d0 = 0.5 * 0.25 - 0.5 = -0.375.
    # A1 = 0.75, A0 = -0.375 + 0.25 * 0.75 = -0.1875. A sample without tokens, and one of its own, lie beside it.
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.25, 0.5])
    advantages, returns = gae_advantages(rewards, values, torch.tensor([2, 0, 1]), discount=0.5, decay=0.5)
    torch.testing.assert_close(advantages, torch.tensor([-0.1875, 0.75, 1.5]))
    torch.testing.assert_close(returns, torch.tensor([0.3125, 1.0, 2.0]))


def test_returns_to_go_worked_by_hand() -> None:
    # 1 + 0.5 (2 + 0.5 * 4) = 3, 2 + 0.5 * 4 = 4, 4; and 8 for another sample.
    result = decayed_sum(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1]), 0.5)
    assert result.tolist() == [3, 4, 4, 8]


def test_token_level_rewards_worked_by_hand() -> None:
    rewards, penalties = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0.5, 0.25, 0.125])
    valid = torch.ones(3, dtype=torch.bool)
    result = token_level_rewards(rewards, valid, penalties, torch.tensor([2, 0, 1]))
    assert result.tolist() == [-0.5, 0.75, 1.875]


def test_overlong_penalty_worked_by_hand() -> None:
    # Of 10 tokens the last 4 are the buffer: 0 to 6, then -1/4 for each token, at most -1.
    result = overlong_penalty(torch.tensor([0, 6, 7, 9, 10, 15]), max_tokens=10, buffer_tokens=4)
    assert result.tolist() == [0, 0, -0.25, -0.75, -1, -1]


@given(lengths=st.lists(st.integers(0, 99), max_size=9), longest=st.integers(1, 80), data=st.data())
def test_overlong_penalty_equals_the_three_cases_of_its_equation(
    lengths: list[int], longest: int, data: st.DataObject
) -> None:
    buffer = data.draw(st.integers(1, longest))
    expected = [
        0.0 if n <= longest - buffer else -1.0 if n > longest else ((longest - buffer) - n) / buffer for n in lengths
    ]
    result = overlong_penalty(torch.tensor(lengths), max_tokens=longest, buffer_tokens=buffer)
    torch.testing.assert_close(result, torch.tensor(expected))


@given(batch=samples, discount=shares, decay=shares)
def test_gae_equals_a_naive_loop(batch: list[list[tuple[float, float]]], discount: float, decay: float) -> None:
    rewards, values, lengths = packed(batch)
    advantages, returns = gae_advantages(rewards, values, lengths, discount=discount, decay=decay)
    expected = [
        a for sample in batch if sample for a in naive_gae(*map(list, zip(*sample, strict=True)), discount, decay)
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(returns, advantages + values)


def test_the_decay_of_a_response_grows_with_its_length_worked_by_hand() -> None:
    # 1 - 1 / (0.05 * 100) = 0.8, 1 - 1 / (0.05 * 25) = 0.2; at 20 tokens it is 0, and below it would be negative.
    lengths = torch.tensor([100, 25, 20, 5, 0])
    torch.testing.assert_close(length_adaptive_decay(lengths, 0.05), torch.tensor([0.8, 0.2, 0.0, 0.0, 0.0]).double())


@given(batch=samples, discount=shares, alpha=st.floats(0.1, 5))
def test_gae_with_a_decay_for_each_length_equals_a_naive_loop(
    batch: list[list[tuple[float, float]]], discount: float, alpha: float
) -> None:
    rewards, values, lengths = packed(batch)
    decay = length_adaptive_decay(lengths, alpha)
    advantages, _ = gae_advantages(rewards, values, lengths, discount=discount, decay=decay)
    expected = [
        a
        for sample in batch
        if sample
        for a in naive_gae(*map(list, zip(*sample, strict=True)), discount, max(0.0, 1 - 1 / (alpha * len(sample))))
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


def gae_of(**settings: float) -> tuple[Tensor, Tensor]:
    """Advantages and the critic's targets of a response of 30 tokens and one of 3, with a reward each."""
    lengths = torch.tensor([30, 3])
    noise = torch.Generator().manual_seed(1)
    inputs = AdvantageInputs(
        rewards=torch.tensor([1.0, 2.0]),
        final_rewards=torch.tensor([1.0, 2.0]),
        penalties=torch.zeros(33),
        is_valid=torch.ones(2, dtype=torch.bool),
        is_trained=torch.ones(2, dtype=torch.bool),
        lengths=lengths,
        group_ids=torch.tensor([0, 1]),
        episode_ids=torch.arange(2),
        columns={"values": torch.randn(33, generator=noise)},
        sum_over_ranks=lambda own: own,
        step=1,
    )
    output = GaeAdvantage.model_validate({"whiten": False, **settings}).compute(inputs)
    return output.advantages, output.columns["returns"]


def test_the_critic_may_have_a_decay_of_its_own() -> None:
    (gains, returns), (of_critic, returns_of_critic) = gae_of(decay=0.7), gae_of(decay=1.0)
    mixed = gae_of(decay=0.7, critic_decay=1.0)
    assert torch.equal(mixed[0], gains)
    assert torch.equal(mixed[1], returns_of_critic)
    assert not torch.allclose(returns, returns_of_critic)
    assert not torch.allclose(gains, of_critic)


def test_vapo_has_a_decay_for_each_length_and_the_whole_reward_for_the_critic() -> None:
    gains, returns = gae_of(length_alpha=0.05, critic_decay=1.0)
    torch.testing.assert_close(returns, torch.tensor([1.0] * 30 + [2.0] * 3))
    long, short = gae_of(decay=1 - 1 / 1.5)[0][:30], gae_of(decay=0.0)[0][30:]
    torch.testing.assert_close(gains, torch.cat([long, short]))


@given(batch=samples, discount=shares)
def test_gae_with_decay_1_and_no_values_is_the_returns_to_go(
    batch: list[list[tuple[float, float]]], discount: float
) -> None:
    rewards, _, lengths = packed(batch)
    advantages, _ = gae_advantages(rewards, torch.zeros_like(rewards), lengths, discount=discount, decay=1.0)
    torch.testing.assert_close(advantages, decayed_sum(rewards, lengths, discount))


@given(batch=samples, discount=shares)
def test_gae_with_decay_1_is_the_returns_to_go_less_the_values(
    batch: list[list[tuple[float, float]]], discount: float
) -> None:
    rewards, values, lengths = packed(batch)
    advantages, returns = gae_advantages(rewards, values, lengths, discount=discount, decay=1.0)
    to_go = decayed_sum(rewards, lengths, discount)
    torch.testing.assert_close(advantages, to_go - values)
    torch.testing.assert_close(returns, to_go)


@given(batch=samples, discount=shares)
def test_gae_with_decay_0_is_the_surprise_of_one_step(batch: list[list[tuple[float, float]]], discount: float) -> None:
    rewards, values, lengths = packed(batch)
    advantages, _ = gae_advantages(rewards, values, lengths, discount=discount, decay=0.0)
    expected = [
        r + discount * (sample[t + 1][1] if t + 1 < len(sample) else 0.0) - v
        for sample in batch
        for t, (r, v) in enumerate(sample)
    ]
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64))


@given(
    batch=st.lists(st.tuples(st.floats(-3, 3), st.booleans(), st.lists(st.floats(-1, 1), max_size=5)), min_size=1),
    held=st.sampled_from([math.nan, math.inf, 1e30]),
)
def test_token_level_rewards_equal_a_naive_loop_and_hold_nothing_of_a_failed_one(
    batch: list[tuple[float, bool, list[float]]], held: float
) -> None:
    expected: list[float] = []
    for reward, is_valid, penalties in batch:
        tokens = [-p for p in penalties]
        if tokens:
            tokens[-1] += reward
        expected += tokens if is_valid else [0.0] * len(tokens)
    rewards = torch.tensor([r if ok else held for r, ok, _ in batch], dtype=torch.float64)
    valid, lengths = torch.tensor([ok for _, ok, _ in batch]), torch.tensor([len(p) for _, _, p in batch])
    penalties = torch.tensor([p for _, _, part in batch for p in part], dtype=torch.float64)
    result = token_level_rewards(rewards, valid, penalties, lengths)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("held", [math.nan, 1e30])
def test_advantages_pass_over_what_the_policy_did_not_write(held: float) -> None:
    # Two turns of two tokens, with two tokens of a tool between them and padding behind: as if they were one turn.
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0, 1]]).bool()
    noise = torch.Generator().manual_seed(0)
    rewards, values = (
        torch.randn(2, 7, dtype=torch.float64, generator=noise).masked_fill(~mask, held) for _ in range(2)
    )
    (packed_rewards, lengths), (packed_values, _) = pack(rewards, mask), pack(values, mask)
    advantages, returns = gae_advantages(packed_rewards, packed_values, lengths, discount=0.9, decay=0.8)
    for row in range(2):
        expected = naive_gae(rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist(), 0.9, 0.8)
        found = unpack(advantages, mask)[row][mask[row]]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert returns.isfinite().all()


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[2, 3], [0, 1]], [[3], [1], [0], [2]]])
def test_returns_do_not_depend_on_order_or_on_how_samples_are_split(split: list[list[int]]) -> None:
    noise = torch.Generator().manual_seed(1)
    lengths = [3, 0, 5, 1]
    parts = [torch.randn(2, n, generator=noise) for n in lengths]
    rewards, values = torch.cat(parts, dim=1)
    whole, _ = gae_advantages(rewards, values, torch.tensor(lengths), discount=0.9, decay=0.8)
    expected = whole.split(lengths)
    for rows in split:
        rewards, values = torch.cat([parts[row] for row in rows], dim=1)
        sizes = torch.tensor([lengths[row] for row in rows])
        result, _ = gae_advantages(rewards, values, sizes, discount=0.9, decay=0.8)
        torch.testing.assert_close(result, torch.cat([expected[row] for row in rows]), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_no_tokens_give_no_advantages(lengths: list[int]) -> None:
    sizes, empty = torch.tensor(lengths, dtype=torch.int64), torch.empty(0)
    assert decayed_sum(empty, sizes, 1.0).shape == (0,)
    assert all(x.shape == (0,) for x in gae_advantages(empty, empty, sizes, discount=1.0, decay=1.0))
    valid = torch.ones(len(lengths), dtype=torch.bool)
    assert token_level_rewards(torch.ones(len(lengths)), valid, empty, sizes).shape == (0,)


def test_bfloat16_is_summed_in_float32() -> None:
    # In bfloat16, 256 + 1 = 256: returns to go of 1000 tokens would stop growing there.
    rewards, lengths = torch.ones(1000, dtype=torch.bfloat16), torch.tensor([1000])
    expected = torch.arange(1000, 0, -1).float()
    torch.testing.assert_close(decayed_sum(rewards, lengths, 1.0), expected)
    advantages, returns = gae_advantages(rewards, torch.zeros_like(rewards), lengths, discount=1.0, decay=1.0)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected)
    assert segment_sum(rewards, lengths).tolist() == [1000]
    assert segment_mean(rewards, lengths).tolist() == [1]
    valid = torch.ones(1, dtype=torch.bool)
    token_rewards = token_level_rewards(torch.tensor([257.0]), valid, torch.zeros(1).bfloat16(), torch.tensor([1]))
    assert token_rewards.item() == 257


@given(batch=samples, decay=shares)
def test_sums_over_segments_equal_a_naive_loop(batch: list[list[tuple[float, float]]], decay: float) -> None:
    values, _, lengths = packed(batch)
    parts = [[v for v, _ in sample] for sample in batch]

    def check(result: Tensor, expected: list[float]) -> None:
        torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))

    check(segment_sum(values, lengths), [math.fsum(part) for part in parts])
    check(segment_mean(values, lengths), [math.fsum(part) / len(part) if part else 0.0 for part in parts])
    check(
        decayed_sum(values, lengths, decay),
        [sum(decay**i * v for i, v in enumerate(part[t:])) for part in parts for t in range(len(part))],
    )
    per_sample = torch.arange(len(batch)).double()
    check(repeat_per_token(per_sample, lengths), [float(i) for i, part in enumerate(parts) for _ in part])
    check(
        add_to_last(values, per_sample, lengths),
        [v + (i if t == len(part) - 1 else 0.0) for i, part in enumerate(parts) for t, v in enumerate(part)],
    )


@pytest.mark.parametrize("lengths", [[3, 0, 2, 1], [6], [1] * 6])
def test_sums_over_segments_have_the_gradients_of_finite_differences(lengths: list[int]) -> None:
    sizes = torch.tensor(lengths)
    values = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for function in (
        lambda v: segment_sum(v, sizes),
        lambda v: segment_mean(v, sizes),
        lambda v: decayed_sum(v, sizes, 0.7),
        lambda v: add_to_last(v, v[: len(lengths)], sizes),
        lambda v: repeat_per_token(v[: len(lengths)], sizes),
        lambda v: gae_advantages(v, v.flip(0), sizes, discount=0.9, decay=0.7),
    ):
        assert torch.autograd.gradcheck(function, values)


def test_segments_without_tokens_count_as_zero() -> None:
    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 0, 1])
    assert segment_sum(values, lengths).tolist() == [0, 3, 0, 3]
    assert segment_mean(values, lengths).tolist() == [0, 1.5, 0, 3]
    assert repeat_per_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), lengths).tolist() == [2, 2, 4]
