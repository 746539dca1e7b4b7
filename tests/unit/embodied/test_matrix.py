"""Rewards of decisions or steps, log-probabilities of numbers, actions or decisions, weights of units or episodes.

Every combination is compared with loops over episodes, decisions, steps and numbers.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from leaderless.algorithms.advantage import AdvantageInputs
from leaderless.algorithms.advantages.body_gae import BodyGaeAdvantage
from leaderless.algorithms.body_decisions import Decisions, RewardGrain
from leaderless.algorithms.packed import Aggregation, Denominators, token_weights
from leaderless.config.environment import Grain
from leaderless.embodied.training.decision_units import DecisionUnits, grained

EXECUTED = [[3, 3, 1], [2], [], [3, 2], [3]]
NUMBERS, CHUNK, DISCOUNT, DECAY = 2, 3, 0.9, 0.8
TRUNCATED = [False, True, True, True, False]
GRAINS: tuple[Grain, ...] = get_args(Grain)
REWARDS: tuple[RewardGrain, ...] = get_args(RewardGrain)
PAIRS = [(reward, grain) for reward in REWARDS for grain in GRAINS if (reward, grain) != ("action", "chunk")]
WEIGHTS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean_token_mean")
NUM_DECISIONS, NUM_STEPS = sum(map(len, EXECUTED)), sum(map(sum, EXECUTED))
NUM_EPISODES = sum(map(bool, EXECUTED))


class Example:
    """Rewards, values and log-probabilities of some episodes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.rewards, self.final = normal(NUM_STEPS), normal(len(EXECUTED))
        self.values = normal(NUM_DECISIONS, CHUNK)  # of each step; of a decision, that of its first
        self.penalties = normal(NUM_DECISIONS, CHUNK, NUMBERS)
        self.log_probs = normal(NUM_DECISIONS, CHUNK, NUMBERS).requires_grad_()


def in_loops(one: Example, reward: RewardGrain, grain: Grain, *, is_penalized: bool) -> list[list[list[float]]]:
    """The advantage of each step of each decision."""
    found: list[list[list[float]]] = []
    step = decision = 0
    for episode, counts in enumerate(EXECUTED):
        starts = [step + sum(counts[:turn]) for turn in range(len(counts))]

        def earned(turn: int, place: int) -> float:
            penalty = float(one.penalties[decision + turn, place].sum()) if is_penalized else 0.0  # noqa: B023
            return float(one.rewards[starts[turn] + place]) - penalty  # noqa: B023

        following = float(one.final[episode]) if TRUNCATED[episode] else 0.0
        gain, gains = 0.0, []
        for turn in reversed(range(len(counts))):
            values = one.values[decision + turn].tolist()
            if reward == "action":
                row = []
                for place in reversed(range(counts[turn])):
                    gain = earned(turn, place) + DISCOUNT * following - values[place] + DISCOUNT * DECAY * gain
                    following = values[place]
                    row.insert(0, gain)
            else:
                total = sum(DISCOUNT**i * float(one.rewards[starts[turn] + i]) for i in range(counts[turn]))
                if is_penalized:  # the penalty of a whole chunk is not that of a step
                    total -= sum(
                        (1.0 if grain == "chunk" else DISCOUNT**i) * float(one.penalties[decision + turn, i].sum())
                        for i in range(counts[turn])
                    )
                power = DISCOUNT ** counts[turn]
                gain = total + power * following - values[0] + power * DECAY * gain
                following = values[0]
                row = [gain] * counts[turn]
            gains.insert(0, row)
        found.append(gains)
        step, decision = step + sum(counts), decision + len(counts)
    return found


def inputs_of(one: Example, units: DecisionUnits, reward: RewardGrain, *, is_penalized: bool) -> AdvantageInputs:
    num_steps = torch.tensor([sum(row) for row in EXECUTED])
    at_units = units.rewards(one.rewards.float(), num_steps).double()
    penalties = grained(one.penalties, units.grain, units.decisions, units.places)
    if not is_penalized:
        penalties = torch.zeros_like(penalties)
    within = Decisions.of(units.turns, units.steps, units.lengths).within
    places = within if reward == "action" else torch.zeros_like(within)
    columns = {
        "values": one.values[units.decisions, places],
        "final_values": one.final,
        "truncated": torch.tensor(TRUNCATED),
        "turns": units.turns.int(),
        "env_steps": units.steps.int(),
        "turn_rewards": at_units,
        "env_rewards": torch.split(one.rewards, num_steps.tolist()),
    }
    nothing, count = torch.zeros(len(EXECUTED), dtype=torch.float64), len(EXECUTED)
    return AdvantageInputs(
        rewards=nothing,
        final_rewards=nothing,
        penalties=penalties - at_units,
        is_valid=torch.ones(count, dtype=torch.bool),
        is_trained=torch.ones(count, dtype=torch.bool),
        lengths=units.lengths,
        group_ids=torch.arange(count),
        episode_ids=torch.arange(count),
        columns=columns,
        sum_over_ranks=lambda values: values,
        step=1,
    )


def advantages(
    one: Example, reward: RewardGrain, grain: Grain, *, is_penalized: bool = False
) -> tuple[DecisionUnits, Tensor]:
    units = DecisionUnits.of(grain, EXECUTED, NUMBERS)
    config = BodyGaeAdvantage(discount=DISCOUNT, decay=DECAY, reward=reward, whiten=False)
    output = config.compute(inputs_of(one, units, reward, is_penalized=is_penalized))
    places = Decisions.of(units.turns, units.steps, units.lengths).within
    values = one.values[units.decisions, places if reward == "action" else torch.zeros_like(places)]
    torch.testing.assert_close(output.columns["returns"], output.advantages + values)
    return units, output.advantages


def gradient(one: Example, reward: RewardGrain, grain: Grain, weight: Aggregation) -> Tensor:
    """Of the policy-gradient loss, by the log-probability of each number: [decisions, chunk, numbers]."""
    units, gains = advantages(one, reward, grain)
    is_valid = torch.ones(len(EXECUTED), dtype=torch.bool)
    totals = Denominators(float(NUM_EPISODES), float(units.lengths.sum()))
    weights = token_weights(weight, units.lengths, is_valid, totals)
    log_probs = grained(one.log_probs, grain, units.decisions, units.places)
    (found,) = torch.autograd.grad((weights * gains * log_probs).sum(), one.log_probs)
    return found


@pytest.mark.parametrize("is_penalized", [False, True])
@pytest.mark.parametrize(("reward", "grain"), PAIRS)
def test_advantages_are_those_of_loops(reward: RewardGrain, grain: Grain, is_penalized: bool) -> None:
    one = Example()
    units, found = advantages(one, reward, grain, is_penalized=is_penalized)
    rows = [row for episode in in_loops(one, reward, grain, is_penalized=is_penalized) for row in episode]
    places = Decisions.of(units.turns, units.steps, units.lengths).within.tolist()
    expected = [rows[decision][place] for decision, place in zip(units.decisions.tolist(), places, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(("reward", "grain"), PAIRS)
def test_gradients_are_those_of_loops(reward: RewardGrain, grain: Grain, weight: Aggregation) -> None:
    one = Example()
    per_decision = {"token": NUMBERS, "action": 1, "chunk": 0}[grain]
    sizes = [sum(per_decision * count or 1 for count in row) for row in EXECUTED]
    expected = torch.zeros(NUM_DECISIONS, CHUNK, NUMBERS, dtype=torch.float64)
    decision = 0
    for episode, rows in enumerate(in_loops(one, reward, grain, is_penalized=False)):
        share = 1 / sum(sizes) if weight == "token_mean" else 1 / (NUM_EPISODES * max(1, sizes[episode]))
        for row in rows:
            for place, gain in enumerate(row):
                expected[decision, place] = gain * share
            decision += 1
    torch.testing.assert_close(gradient(one, reward, grain, weight), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_units_of_numbers_and_of_actions_differ_by_a_constant(weight: Aggregation) -> None:
    """Where the ratio is 1: sum over numbers = action, and there are NUMBERS times as many units."""
    one = Example()
    for reward in REWARDS:
        by_number, by_action = (gradient(one, reward, grain, weight) for grain in ("token", "action"))
        torch.testing.assert_close(NUMBERS * by_number, by_action)


def test_a_unit_weighs_a_decision_that_was_cut_as_much_as_a_whole_one() -> None:
    """By chunks, a decision of k steps has the weight of one unit; by actions, that of k."""
    one = Example()
    by_action, by_chunk = (gradient(one, "chunk", grain, "token_mean") for grain in ("action", "chunk"))
    torch.testing.assert_close(by_action * NUM_STEPS, by_chunk * NUM_DECISIONS)


@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_a_decision_is_a_step_whose_discount_is_that_of_a_step_to_the_power_of_its_size(
    grain: Grain, size: int
) -> None:
    """Rewards summed up with the discount, and gamma^C between decisions, are GAE of a process without chunks."""
    generator = torch.Generator().manual_seed(size)
    rewards, values = (torch.randn(count, generator=generator, dtype=torch.float64) for count in (12, 12 // size))
    units, after = DecisionUnits.of(grain, [[size] * (12 // size)], NUMBERS), torch.tensor([0.6], dtype=torch.float64)
    decisions = Decisions.of(units.turns, units.steps, units.lengths)
    gained = decisions.gained_by_step(rewards, DISCOUNT)
    found = decisions.advantages(gained, values, after, discount=DISCOUNT, decay=DECAY)
    by_decision = [sum(DISCOUNT**i * float(r) for i, r in enumerate(part)) for part in rewards.split(size)]
    gain, following, expected = 0.0, 0.6, []
    for reward, value in zip(reversed(by_decision), reversed(values.tolist()), strict=True):
        gain = reward + DISCOUNT**size * following - value + DISCOUNT**size * DECAY * gain
        following = value
        expected.insert(0, gain)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    without_critic = decisions.advantages(gained, 0 * values, after, discount=DISCOUNT, decay=1.0)
    single = Decisions.of(torch.arange(12), torch.arange(12), torch.tensor([12]))
    whole = single.advantages(rewards, 0 * rewards, after, discount=DISCOUNT, decay=1.0)
    torch.testing.assert_close(without_critic, whole[::size])


@pytest.mark.parametrize(("reward", "grain"), PAIRS)
def test_episodes_do_not_depend_on_one_another(reward: RewardGrain, grain: Grain) -> None:
    one = Example()
    before = advantages(one, reward, grain)[1]
    one.rewards[-3:], one.values[-1], one.final[-1] = 5.0, -3.0, 2.0  # of the last episode alone
    units, after = advantages(one, reward, grain)
    others = int(units.lengths[:-1].sum())
    assert torch.equal(before[:others], after[:others])
    assert not torch.allclose(before[others:], after[others:])


def test_rewards_before_a_step_do_not_count_for_it() -> None:
    one = Example()
    units, before = advantages(one, "action", "action")
    one.rewards[0] += 10.0
    _, after = advantages(one, "action", "action")
    changed = (before - after).abs() > 1e-6
    assert changed.tolist() == [True] + [False] * (len(changed) - 1)
    assert int(units.steps[0]) == 0
