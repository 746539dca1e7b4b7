"""Advantages over the decisions of a body, against loops, and what they must not depend on."""

from __future__ import annotations

import pytest
import torch

from leaderless.algorithms.advantages.body_gae import decision_advantages
from leaderless.config.body import Grain
from leaderless.training.units import Units

EXECUTED = [[3, 3, 1], [2], [], [3, 2]]
DISCOUNT, DECAY, NUMBERS = 0.9, 0.8, 2


def example(grain: Grain) -> tuple[Units, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    num_steps = torch.tensor([sum(row) for row in EXECUTED])
    rewards, values = torch.randn(int(num_steps.sum()), dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    after = torch.tensor([0.0, 1.5, 0.0, -0.7], dtype=torch.float64)
    return Units.of(grain, EXECUTED, NUMBERS), rewards, values, after, num_steps


def naive(rewards: torch.Tensor, values: torch.Tensor, after: torch.Tensor, *, is_summed: bool) -> list[float]:
    """The advantage of each decision."""
    found: list[float] = []
    step = decision = 0
    for episode, counts in enumerate(EXECUTED):
        starts = [step + sum(counts[:turn]) for turn in range(len(counts))]
        gains: list[float] = []
        following, gain = float(after[episode]), 0.0
        for turn in reversed(range(len(counts))):
            count, value = counts[turn], float(values[decision + turn])
            power = 0.0 if is_summed else 1.0
            got = sum(DISCOUNT ** (power * i) * float(rewards[starts[turn] + i]) for i in range(count))
            surprise = got + DISCOUNT**count * following - value
            gain = surprise + DISCOUNT**count * DECAY * gain
            gains.insert(0, gain)
            following = value
        found += gains
        step, decision = step + sum(counts), decision + len(counts)
    return found


@pytest.mark.parametrize("grain", ["token", "action", "chunk"])
def test_advantages_are_those_of_loops(grain: Grain) -> None:
    units, rewards, values, after, num_steps = example(grain)
    by_unit = units.rewards(rewards.float(), num_steps).double()
    found = decision_advantages(
        by_unit, values[units.decisions], after, units.turns, units.steps, units.lengths, discount=DISCOUNT, decay=DECAY
    )
    expected = torch.tensor(naive(rewards, values, after, is_summed=grain == "chunk"), dtype=torch.float64)
    torch.testing.assert_close(found, expected[units.decisions], rtol=0, atol=1e-5)


def test_with_lambda_1_decisions_of_any_size_have_the_discounted_return() -> None:
    """Returns are those of single steps: a decision of k steps is worth discount^k of what comes after."""
    rewards, after = torch.randn(12, dtype=torch.float64), torch.tensor([0.6], dtype=torch.float64)
    expected, following = [], 0.6
    for reward in reversed(rewards.tolist()):
        following = reward + DISCOUNT * following
        expected.insert(0, following)
    for size in (1, 2, 3, 4, 6):
        units = Units.of("action", [[size] * (12 // size)], 1)
        values = torch.randn(12 // size, dtype=torch.float64)[units.decisions]
        found = decision_advantages(
            rewards, values, after, units.turns, units.steps, units.lengths, discount=DISCOUNT, decay=1.0
        )
        torch.testing.assert_close((found + values)[::size], torch.tensor(expected[::size], dtype=torch.float64))


def test_episodes_do_not_depend_on_one_another() -> None:
    units, rewards, values, after, num_steps = example("token")
    by_unit, own = units.rewards(rewards.float(), num_steps).double(), values[units.decisions]
    options = {"discount": DISCOUNT, "decay": DECAY}
    whole = decision_advantages(by_unit, own, after, units.turns, units.steps, units.lengths, **options)
    begin = 0
    for episode, length in enumerate(units.lengths.tolist()):
        here = slice(begin, begin + length)
        alone = decision_advantages(
            by_unit[here],
            own[here],
            after[episode : episode + 1],
            units.turns[here],
            units.steps[here],
            torch.tensor([length]),
            **options,
        )
        torch.testing.assert_close(alone, whole[here])
        begin += length
