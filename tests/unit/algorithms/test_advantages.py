"""Advantages of responses within their group: by hand, compared with loops, and their common rule about signal."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from statistics import fmean, pstdev, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from leaderless.algorithms import (
    Advantage,
    AdvantageInputs,
    Groups,
    count_groups,
    count_groups_without_signal,
    repeat_per_token,
)
from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.advantages.cpgd import CpgdAdvantage
from leaderless.algorithms.advantages.distillation import DistillationAdvantage
from leaderless.algorithms.advantages.gpg import GpgAdvantage
from leaderless.algorithms.advantages.grpo import GrpoAdvantage
from leaderless.algorithms.advantages.maxrl import MaxrlAdvantage
from leaderless.algorithms.advantages.opo import OpoAdvantage
from leaderless.algorithms.advantages.pass_at_k import PassAtKAdvantage
from leaderless.algorithms.advantages.rejection import RejectionAdvantage
from leaderless.algorithms.advantages.remax import RemaxAdvantage
from leaderless.algorithms.advantages.rloo import RlooAdvantage

EPSILON = 1e-6

Estimate = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""From rewards, their validity, lengths, group ids and the share of groups with a signal."""

Twin = Callable[[list[float], list[int], float], list[float]]
"""From a group's valid rewards, their lengths and the share: one group at a time, in plain Python."""


def advantages_of(
    advantage: Advantage,
    rewards: Tensor,
    valid: Tensor,
    groups: Tensor,
    lengths: Tensor | None = None,
    share: float | None = None,
    **columns: Tensor,
) -> Tensor:
    """The advantages of responses, of one token each unless lengths are given; `share` is of groups with a signal."""
    return advantage.compute(
        AdvantageInputs(
            rewards=rewards,
            final_rewards=rewards,
            penalties=torch.zeros(0),
            is_valid=valid,
            is_trained=valid,
            lengths=torch.ones(len(rewards), dtype=torch.int64) if lengths is None else lengths,
            group_ids=groups,
            episode_ids=torch.arange(len(rewards)),
            columns=columns,
            sum_over_ranks=lambda own: own if share is None else torch.tensor([share, 1.0], dtype=torch.float64),
            step=1,
        )
    ).advantages


def estimate(name: str, **settings: float) -> Estimate:
    advantage = ADVANTAGES[name].model_validate(settings)
    return lambda rewards, valid, lengths, groups, share: advantages_of(
        advantage, rewards, valid, groups, lengths, share
    )


def naive_opo(rewards: list[float], lengths: list[int], share: float) -> list[float]:
    if not sum(lengths):
        return rewards
    baseline = sum(length * r for length, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def naive_rloo(rewards: list[float], lengths: list[int], share: float) -> list[float]:
    return [r - fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]


def naive_pass_at_k(k: int) -> Twin:
    def twin(rewards: list[float], lengths: list[int], share: float) -> list[float]:
        """All sets of k count with their best response, and a response has the mean advantage of its sets."""
        correct = [r > 0 for r in rewards]
        sets = list(combinations(range(len(correct)), k))
        worth = [float(any(correct[i] for i in chosen)) for chosen in sets]
        if len(set(worth)) < 2:
            return [0.0] * len(correct)
        gains = [(w - fmean(worth)) / pstdev(worth) for w in worth]
        return [fmean(g for g, chosen in zip(gains, sets, strict=True) if i in chosen) for i in range(len(correct))]

    return twin


ESTIMATES: dict[str, tuple[Estimate, Twin]] = {
    "grpo": (
        estimate("grpo", epsilon=EPSILON),
        lambda r, _n, _s: [(x - fmean(r)) / (stdev(r) + EPSILON) for x in r],
    ),
    "dr_grpo": (
        estimate("grpo", normalize_by_std=False),
        lambda r, _n, _s: [x - fmean(r) for x in r],
    ),
    "rloo": (estimate("rloo"), naive_rloo),
    "opo": (estimate("opo"), naive_opo),
    "gpg": (
        estimate("gpg"),
        lambda r, _n, s: [(x - fmean(r)) / s for x in r],
    ),
    "cpgd": (
        estimate("cpgd", max_weight=2.0),
        lambda r, _n, s: [min(2.0, 1 / s) * (x - fmean(r)) for x in r],
    ),
    "maxrl": (
        estimate("maxrl", correct_at=0.1),
        lambda r, _n, _s: [(float(x > 0) - fmean(float(y > 0) for y in r)) / fmean(float(y > 0) for y in r) for x in r],
    ),
    **{f"pass_at_{k}": (estimate("pass_at_k", k=k, correct_at=0.1), naive_pass_at_k(k)) for k in (1, 2, 4)},
}

rows = st.lists(
    st.tuples(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0, 7.0]), st.booleans(), st.integers(0, 9), st.integers(0, 3)),
    min_size=1,
    max_size=18,
)


def columns(samples: list[tuple[float, bool, int, int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rewards (failed ones are NaN), their validity, lengths, and group ids."""
    rewards, valid, lengths, groups = (torch.tensor(part) for part in zip(*samples, strict=True))
    return torch.where(valid, rewards, torch.nan), valid, lengths, groups * 1000 - 7


def naive(name: str, samples: list[tuple[float, bool, int, int]]) -> tuple[list[float], float]:
    """The advantage of each sample, and the share of groups with a signal."""
    members = {
        group: [i for i, sample in enumerate(samples) if sample[3] == group and sample[1]]
        for group in {sample[3] for sample in samples}
    }

    def worth(i: int) -> float:
        return float(samples[i][0] > 0) if name.startswith(("pass", "maxrl")) else samples[i][0]

    taught = {group: chosen for group, chosen in members.items() if len({worth(i) for i in chosen}) > 1}
    share = sum(len({samples[i][0] for i in chosen}) > 1 for chosen in members.values()) / len(members)
    result = [0.0] * len(samples)
    for chosen in taught.values():
        values = ESTIMATES[name][1]([worth(i) for i in chosen], [samples[i][2] for i in chosen], share)
        for i, value in zip(chosen, values, strict=True):
            result[i] = value
    return result, share


def global_share(parts: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    with_signal, count = torch.stack([count_groups(*part) for part in parts]).sum(0).tolist()
    return float(with_signal / max(count, 1))


@pytest.mark.parametrize("name", ESTIMATES)
@given(samples=rows, seed=st.integers(0, 99))
def test_advantages_equal_a_naive_loop_in_any_order(
    name: str, samples: list[tuple[float, bool, int, int]], seed: int
) -> None:
    expected, share = naive(name, samples)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    rewards, valid, lengths, groups = (column[order] for column in columns(samples))
    assert global_share([(rewards, valid, groups)]) == pytest.approx(share)
    result = ESTIMATES[name][0](rewards, valid, lengths, groups, share)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, torch.tensor(expected)[order], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", ESTIMATES)
def test_advantages_do_not_depend_on_the_rank_a_group_is_on(name: str, world_size: int) -> None:
    noise = torch.Generator().manual_seed(0)
    groups = torch.arange(8).repeat_interleave(4)
    rewards = torch.randint(0, 2, (32,), generator=noise).float()
    rewards[:4] = 1.0
    valid, lengths = torch.rand(32, generator=noise) > 0.2, torch.randint(0, 9, (32,), generator=noise)
    estimate = ESTIMATES[name][0]
    whole = estimate(rewards, valid, lengths, groups, global_share([(rewards, valid, groups)]))
    parts = [groups % world_size == rank for rank in range(world_size)]
    share = global_share([(rewards[part], valid[part], groups[part]) for part in parts])
    assert share < 1
    for part in parts:
        result = estimate(rewards[part], valid[part], lengths[part], groups[part], share)
        torch.testing.assert_close(result, whole[part], rtol=0, atol=0)


@pytest.mark.parametrize("name", ESTIMATES)
def test_groups_without_a_signal_have_no_advantage(name: str) -> None:
    # Equal rewards; a single response; a single valid one; none valid; 0.1, which no float holds exactly; and 1e30.
    rewards = torch.tensor([1.0, 1.0, 1.0, 5.0, 1.0, math.nan, math.nan, math.inf, 0.1, 0.1, 0.1, 1e30, 1e30])
    valid = torch.tensor([True] * 5 + [False] * 3 + [True] * 5)
    groups, lengths = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5]), torch.arange(13)
    result = ESTIMATES[name][0](rewards, valid, lengths, groups, global_share([(rewards, valid, groups)]))
    assert result.tolist() == [0.0] * 13
    assert count_groups(rewards, valid, groups).tolist() == [0, 6]
    assert count_groups_without_signal(result, groups) == (6, 6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "cpgd", "maxrl", "pass_at_1"])
def test_a_failed_reward_leaves_its_group_and_the_others_are_as_if_it_had_never_been(name: str) -> None:
    rewards = torch.tensor([1.0, math.nan, math.nan, 1.0, 0.0, 1e30])
    valid, groups = torch.tensor([True, False, False, True, True, False]), torch.tensor([0, 0, 0, 1, 1, 1])
    result = ESTIMATES[name][0](rewards, valid, torch.full((6,), 5), groups, 0.5)
    kept = ESTIMATES[name][0](rewards[3:5], valid[3:5], torch.full((2,), 5), groups[3:5], 0.5)
    assert result.tolist() == [0.0, 0.0, 0.0, *kept.tolist(), 0.0]
    assert result[3] > 0 > result[4]
    assert count_groups_without_signal(result, groups) == (1, 2)


@pytest.mark.parametrize("name", ESTIMATES)
def test_no_samples_give_no_advantages(name: str) -> None:
    empty, ids = torch.empty(0), torch.empty(0, dtype=torch.int64)
    assert ESTIMATES[name][0](empty, empty.bool(), ids, ids, 0.0).shape == (0,)
    assert count_groups_without_signal(empty, ids) == (0, 0)


@pytest.mark.parametrize("name", ESTIMATES)
def test_bfloat16_rewards_are_computed_with_in_double_precision(name: str) -> None:
    rewards, valid = torch.tensor([1.0, 0.0, 0.25, 0.0]), torch.ones(4, dtype=torch.bool)
    lengths, groups = torch.tensor([3, 500, 7, 11]), torch.zeros(4, dtype=torch.int64)
    results = [ESTIMATES[name][0](r, valid, lengths, groups, 0.3) for r in (rewards, rewards.bfloat16())]
    assert results[1].dtype == torch.float32
    torch.testing.assert_close(*results, rtol=0, atol=0)


def one_group(rewards: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor(rewards), torch.ones(len(rewards), dtype=torch.bool), torch.zeros(len(rewards)).long()


def test_grpo_worked_by_hand() -> None:
    # Rewards 1, 0, 0, 0: mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4, so the deviation is 1/2.
    result = advantages_of(GrpoAdvantage(epsilon=EPSILON), *one_group([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(result, torch.tensor([1.5, -0.5, -0.5, -0.5]), atol=1e-5, rtol=0)


def test_dr_grpo_worked_by_hand() -> None:
    # Mean 4/3, and no division.
    result = advantages_of(GrpoAdvantage(normalize_by_std=False), *one_group([1.0, 0.0, 3.0]))
    torch.testing.assert_close(result, torch.tensor([-1 / 3, -4 / 3, 5 / 3]))


def test_rloo_worked_by_hand() -> None:
    # The means of the others are (0 + 3) / 2, (1 + 3) / 2 and (1 + 0) / 2.
    result = advantages_of(RlooAdvantage(), *one_group([1.0, 0.0, 3.0]))
    torch.testing.assert_close(result, torch.tensor([-0.5, -2.0, 2.5]))


@given(st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=9))
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(rewards: list[float]) -> None:
    group, n = one_group(rewards), len(rewards)
    mean_centred = advantages_of(GrpoAdvantage(normalize_by_std=False), *group)
    torch.testing.assert_close(advantages_of(RlooAdvantage(), *group), mean_centred * n / (n - 1))


def test_opo_worked_by_hand() -> None:
    # Baseline (1 * 4 + 3 * 0) / (1 + 3) = 1.
    rewards, valid, groups = one_group([4.0, 0.0])
    result = advantages_of(OpoAdvantage(), rewards, valid, groups, torch.tensor([1, 3]))
    torch.testing.assert_close(result, torch.tensor([3.0, -1.0]))


def test_no_baseline_has_less_variance_than_that_of_opo() -> None:
    # A response has 1, 2 or 3 tokens with equal probability, each 0 or 1 with equal probability and a logit for each
    # place. All 2 + 4 + 8 outcomes are counted: those of 1 token 12 times, of 2 tokens 6 times, of 3 tokens 3 times.
    outcomes, gradients, copies = [], [], []
    for length in (1, 2, 3):
        for bits in torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * length).reshape(-1, length):
            outcomes.append((float(3 * bits[0] + 2 * length), length))
            gradients.append(torch.nn.functional.pad(bits - 0.5, (0, 3 - length)).double())  # of log p in the logits
            copies.append(24 // 2**length)
    times = torch.tensor(copies)
    rewards, lengths = (torch.tensor(part).repeat_interleave(times) for part in zip(*outcomes, strict=True))
    scores = torch.stack(gradients).repeat_interleave(times, dim=0)
    valid, groups = torch.ones(len(rewards), dtype=torch.bool), torch.zeros(len(rewards)).long()
    baseline = (rewards - advantages_of(OpoAdvantage(), rewards, valid, groups, lengths)).mean().item()

    def variance(b: float) -> float:
        estimates = (rewards.double() - b)[:, None] * scores
        return estimates.var(dim=0, correction=0).sum().item()

    assert variance(baseline) < variance(rewards.mean().item()), "the mean is another baseline, and a worse one"
    for distance in (0.01, 0.1, 1.0, 3.0):
        assert variance(baseline) < min(variance(baseline - distance), variance(baseline + distance))


def test_gpg_and_cpgd_worked_by_hand() -> None:
    # Two of five groups have a signal: 1 / 0.4 = 2.5, which CPGD cuts to 2. Mean-centred rewards are 1/2 and -1/2.
    group = one_group([1.0, 0.0])
    for advantage, expected in (
        (GpgAdvantage(), 1.25),
        (CpgdAdvantage(max_weight=2.0), 1.0),
        (CpgdAdvantage(max_weight=3.0), 1.25),
    ):
        result = advantages_of(advantage, *group, share=0.4)
        torch.testing.assert_close(result, torch.tensor([expected, -expected]))


def test_gpg_gives_a_mean_over_all_groups_the_size_of_one_over_groups_with_a_signal() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    valid = torch.ones(6, dtype=torch.bool)
    result = advantages_of(GpgAdvantage(), rewards, valid, groups)
    assert result.abs().mean() == pytest.approx(0.5)


def test_pass_at_k_worked_by_hand() -> None:
    # Of 4, one is correct; k = 2: p = 1 - C(3,2)/C(4,2) = 1/2, s = 1/2. Correct: (1 - 1/2) / (1/2) = 1.
    # Wrong: C(2,1)/C(3,1) = 2/3, so (1/2 - 2/3) / (1/2) = -1/3.
    result = advantages_of(PassAtKAdvantage(k=2), *one_group([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(result, torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def test_pass_at_k_has_no_signal_where_a_set_cannot_be_formed_or_cannot_fail() -> None:
    for k in (2, 3, 4, 9):  # every pair of these contains a correct one; and there are not 4
        assert not advantages_of(PassAtKAdvantage(k=k), *one_group([1.0, 1.0, 0.0])).any()


def test_maxrl_worked_by_hand() -> None:
    # Of 4, one is correct: (1 - 1/4) / (1/4) = 3, and (0 - 1/4) / (1/4) = -1. Of 4, three are: 1/3, and -1.
    for rewards, expected in (([1.0, 0.0, 0.2, -3.0], [3.0, -1.0, -1.0, -1.0]), ([1.0, 1.0, 2.0, 0.0], [1 / 3] * 3)):
        result = advantages_of(MaxrlAdvantage(), *one_group(rewards))
        torch.testing.assert_close(result, torch.tensor([*expected, -1.0][:4]))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_maxrl_follows_the_first_terms_of_the_logarithm_of_the_chance(n: int, chance: float) -> None:
    # A response is correct with a chance p. The gradient in p of the logarithm of its probability is 1 / p if it is,
    # and -1 / (1 - p) if not. On average over all outcomes of n responses, the estimate is the derivative of n - 1
    # terms of log p = -sum (1 - p)^k / k, where that of the chance itself is 1.
    total = 0.0
    for num_correct in range(n + 1):
        rewards = [1.0] * num_correct + [0.0] * (n - num_correct)
        gains = advantages_of(MaxrlAdvantage(), *one_group(rewards)).tolist()
        scores = [1 / chance if reward else -1 / (1 - chance) for reward in rewards]
        weight = math.comb(n, num_correct) * chance**num_correct * (1 - chance) ** (n - num_correct)
        total += weight * fmean(gain * score for gain, score in zip(gains, scores, strict=True))
    assert total == pytest.approx(sum((1 - chance) ** k for k in range(n - 1)), rel=1e-5)


def remax(rewards: Tensor, valid: Tensor, greedy: Tensor, greedy_valid: Tensor) -> Tensor:
    """The advantages of sampled responses, each to a prompt with a greedy one."""
    count = len(rewards)
    both, are_valid, groups = (
        torch.cat([rewards, greedy]),
        torch.cat([valid, greedy_valid]),
        torch.arange(count).repeat(2),
    )
    is_greedy = torch.arange(2 * count) >= count
    return advantages_of(RemaxAdvantage(), both, are_valid, groups, is_greedy=is_greedy)[:count]


def test_remax_worked_by_hand_and_without_a_reward_that_failed() -> None:
    rewards, greedy = torch.tensor([1.0, math.nan, 1.0, 0.25]), torch.tensor([0.25, 0.0, math.nan, 1.0])
    valid, greedy_valid = torch.tensor([True, False, True, True]), torch.tensor([True, True, False, True])
    assert remax(rewards, valid, greedy, greedy_valid).tolist() == [0.75, 0.0, 0.0, -0.75]
    half = remax(rewards.bfloat16(), valid, greedy.bfloat16(), greedy_valid)
    assert half.dtype == torch.float32
    assert half.tolist() == [0.75, 0.0, 0.0, -0.75]


@given(st.lists(st.tuples(*[st.floats(-9, 9), st.booleans()] * 2), max_size=12))
def test_remax_equals_a_naive_loop(samples: list[tuple[float, bool, float, bool]]) -> None:
    expected = [r - g if ok and greedy_ok else 0.0 for r, ok, g, greedy_ok in samples]
    values = torch.tensor([[r if ok else math.nan, g if fine else math.inf] for r, ok, g, fine in samples]).reshape(
        -1, 2
    )
    valid = torch.tensor([[ok, fine] for _, ok, _, fine in samples], dtype=torch.bool).reshape(-1, 2)
    result = remax(values[:, 0], valid[:, 0], values[:, 1], valid[:, 1])
    torch.testing.assert_close(result, torch.tensor(expected))


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    rewards, valid = torch.zeros(len(student)), torch.ones(len(student), dtype=torch.bool)
    log_probs = {"old_log_probs": student, "ref_log_probs": teacher}
    return advantages_of(DistillationAdvantage(), rewards, valid, torch.arange(len(student)), **log_probs)


@given(st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=20))
def test_distillation_is_the_gradient_of_the_divergence_to_the_teacher(tokens: list[tuple[float, float]]) -> None:
    student, teacher = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2).unbind(1)
    expected = torch.tensor([t - s for s, t in tokens], dtype=torch.float32)
    torch.testing.assert_close(distillation(student, teacher), expected)


def test_distillation_follows_the_exact_gradient_over_all_outcomes() -> None:
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.0, -0.5, 0.2], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits, retain_graph=True)
    gains = distillation(log_probs, teacher).double()
    (sampled,) = torch.autograd.grad(-(log_probs.detach().exp() * gains * log_probs).sum(), logits)
    torch.testing.assert_close(sampled, exact, atol=1e-6, rtol=1e-5)


def test_rejection_makes_a_mean_over_all_tokens_one_over_correct_ones() -> None:
    correct, valid = torch.tensor([True, False, True, True]), torch.tensor([True, True, True, False])
    lengths, losses = torch.tensor([3, 5, 2, 4]), torch.arange(14.0)
    # 3 + 2 tokens are correct, of 3 + 5 + 2 that count.
    found = advantages_of(RejectionAdvantage(), correct.float(), valid, torch.arange(4), lengths)
    assert found.tolist() == [2, 0, 2, 0]
    gains = repeat_per_token(found, lengths)
    is_counted = repeat_per_token(valid, lengths)
    assert float((gains * losses)[is_counted].mean()) == pytest.approx(float(losses[[0, 1, 2, 8, 9]].mean()))
    assert not advantages_of(RejectionAdvantage(), torch.zeros(4), valid, torch.arange(4), lengths).any()


def test_statistics_of_groups_worked_by_hand() -> None:
    rewards = torch.tensor([3.0, 1.0, math.nan, 5.0, 2.0])
    groups = Groups.of(rewards, ~rewards.isnan(), torch.tensor([9, 9, 9, 9, -4]))
    assert groups.count.tolist() == [1, 3]
    assert groups.mean.tolist() == [2, 3]
    assert groups.std().tolist() == [0, 2]
    assert groups.has_signal.tolist() == [False, True]
    assert groups.sum(torch.tensor([1.0, 1.0, math.nan, 2.0, 7.0])).tolist() == [7, 4]
