"""GAE over the turns of several agents: against a naive loop, plain GAE, torchrl, exact values, and others' bugs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.test_advantages import LENGTHS as ROW_LENGTHS
from tests.contracts.test_advantages import inputs_of
from torch import Tensor

from leaderless.algorithms import Moments, repeat_per_token
from leaderless.algorithms.advantage import compute
from leaderless.algorithms.advantages.chained_gae import ChainedGaeAdvantage, Level, chained_gae
from leaderless.algorithms.advantages.gae import GaeAdvantage, gae_advantages
from leaderless.algorithms.settings import AlgorithmConfig
from leaderless.algorithms.team_plays import Plays, whitened_by_agent


@dataclass
class Turn:
    """What an agent says: the reward of each token, and the critic's value before it."""

    play: int
    agent: int
    rewards: list[float]
    values: list[float]


def rows_of(turns: list[Turn]) -> tuple[dict[str, Tensor], list[list[tuple[int, int]]]]:
    """Rows, one for each agent of each play, and the turn of each of their tokens with its place in it."""
    numbers, row_of = dict[int, int](), dict[tuple[int, int], list[tuple[int, int]]]()
    number_of = []
    for place, turn in enumerate(turns):
        number_of.append(numbers.get(turn.play, 0))
        numbers[turn.play] = number_of[-1] + 1
        row_of.setdefault((turn.play, turn.agent), []).extend((place, i) for i in range(len(turn.rewards)))
    rows = list(row_of.values())
    flat = [token for row in rows for token in row]
    columns = {
        "joint_ids": torch.tensor([play * 7 + 3 for play, _ in row_of]),
        "lengths": torch.tensor([len(row) for row in rows]),
        "turns": torch.tensor([number_of[place] for place, _ in flat], dtype=torch.int32),
        "rewards": torch.tensor([turns[place].rewards[i] for place, i in flat], dtype=torch.float64),
        "values": torch.tensor([turns[place].values[i] for place, i in flat], dtype=torch.float64),
    }
    return columns, rows


def estimate(turns: list[Turn], **settings: object) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns of each turn's tokens."""
    columns, rows = rows_of(turns)
    plays = Plays.of(columns["joint_ids"], columns["turns"], columns["lengths"])
    found = chained_gae(columns["rewards"], columns["values"], plays, **settings)  # type: ignore[arg-type]
    flat = [token for row in rows for token in row]
    result = []
    for part in found:
        by_turn = [[0.0] * len(turn.rewards) for turn in turns]
        for (place, i), value in zip(flat, part.tolist(), strict=True):
            by_turn[place][i] = value
        result.append(by_turn)
    return result[0], result[1]


def naive(
    turns: list[Turn], level: Level, turn_discount: float, token_discount: float, decay: float
) -> list[list[float]]:
    """The same, one step at a time from the end of each play."""
    result = [[0.0] * len(turn.rewards) for turn in turns]
    for play in {turn.play for turn in turns}:
        next_value = next_gain = 0.0
        for place in reversed(range(len(turns))):
            turn = turns[place]
            if turn.play != play or not turn.rewards:
                continue
            if level == "action":
                delta = sum(turn.rewards) + turn_discount * next_value - turn.values[0]
                next_gain, next_value = delta + turn_discount * decay * next_gain, turn.values[0]
                result[place] = [next_gain] * len(turn.rewards)
                continue
            discount = turn_discount
            for i in reversed(range(len(turn.rewards))):
                delta = turn.rewards[i] + discount * next_value - turn.values[i]
                next_gain, next_value = delta + discount * decay * next_gain, turn.values[i]
                result[place][i], discount = next_gain, token_discount
    return result


numbers = st.sampled_from([-1.5, -0.5, 0.0, 0.25, 1.0])
tokens = st.lists(st.tuples(numbers, numbers), max_size=4)
turn_lists = st.lists(
    st.builds(
        lambda play, agent, some: Turn(play, agent, [r for r, _ in some], [v for _, v in some]),
        st.integers(0, 2),
        st.integers(0, 2),
        tokens,
    ),
    min_size=1,
    max_size=9,
)


@given(turn_lists, st.sampled_from(["token", "action"]), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.7, 1.0]))
def test_chained_gae_equals_a_naive_loop(turns: list[Turn], level: Level, discount: float, decay: float) -> None:
    token_discount = 0.8 if level == "token" else 1.0
    settings = {"turn_discount": discount, "token_discount": token_discount, "decay": decay}
    gains, returns = estimate(turns, level=level, **settings)
    expected = naive(turns, level, discount, token_discount, decay)
    for turn, gain, result, other in zip(turns, gains, returns, expected, strict=True):
        assert gain == pytest.approx(other, abs=1e-9)
        values = turn.values if level == "token" else turn.values[:1] * len(turn.values)
        assert result == pytest.approx([g + v for g, v in zip(gain, values, strict=True)])


TORCHRL = json.loads((Path(__file__).parent / "torchrl_gae.json").read_text(encoding="utf-8"))
"""What torchrl computes; torchrl_gae.py has written it."""


@pytest.mark.parametrize("case", TORCHRL["chains"])
def test_chained_gae_equals_torchrl_on_one_time_axis(case: dict[str, object]) -> None:
    turns = [Turn(*turn) for turn in case["turns"]]  # type: ignore[attr-defined]
    settings: dict[str, object] = case["settings"]  # type: ignore[assignment]
    for found, name in zip(estimate(turns, **settings), ("advantages", "returns"), strict=True):
        steps = [turn[:1] if settings["level"] == "action" else turn for turn in found]
        assert [value for turn in steps for value in turn] == pytest.approx(case[name], abs=1e-12)


def test_without_discounts_a_chain_of_agents_equals_the_estimator_of_torchrl_for_teams() -> None:
    """There all agents act at one time; here one after the other, and the last one is rewarded."""
    team = TORCHRL["team"]
    turns = [
        Turn(play, agent, [reward if agent == 1 else 0.0], [value])
        for play, (rewards, steps) in enumerate(zip(team["rewards"], team["values"], strict=True))
        for reward, values in zip(rewards, steps, strict=True)
        for agent, value in enumerate(values)
    ]
    gains, _ = estimate(turns, level="token", turn_discount=1.0, decay=1.0)
    flat = [gain for turn in gains for gain in turn]
    assert flat == pytest.approx([v for play in team["advantages"] for step in play for v in step], abs=1e-6)
    actor = torch.tensor([turn.agent for turn in turns])
    everyone = torch.ones_like(actor, dtype=torch.bool)
    whitened = whitened_by_agent(torch.tensor(flat), everyone, actor, 1e-8, lambda totals: totals)
    assert whitened.tolist() == pytest.approx([v for play in team["whitened"] for step in play for v in step], abs=1e-6)


@pytest.mark.parametrize("whiten", [False, True])
def test_one_agent_with_one_turn_has_exactly_the_advantages_of_gae(whiten: bool) -> None:
    plain = GaeAdvantage(discount=0.97, decay=0.9, whiten=whiten)
    inputs = inputs_of(plain)
    alone = {
        **inputs.columns,
        "joint_ids": inputs.episode_ids,
        "actor": torch.zeros_like(inputs.episode_ids),
        "turns": torch.zeros_like(inputs.penalties, dtype=torch.int32),
    }
    for level in ("token", "all"):
        chained = ChainedGaeAdvantage(token_discount=0.97, decay=0.9, whiten="agent" if whiten else "none")
        chained = chained.model_copy(update={"whiten": "all"}) if whiten and level == "all" else chained
        expected, result = compute(plain, inputs), compute(chained, type(inputs)(**{**vars(inputs), "columns": alone}))
        assert torch.equal(result.advantages, expected.advantages)
        is_valid = repeat_per_token(inputs.is_valid, inputs.lengths)
        assert torch.equal(result.columns["returns"][is_valid], expected.columns["returns"][is_valid])


@pytest.mark.parametrize(("turn_discount", "decay"), [(1.0, 1.0), (0.9, 0.8)])
def test_agents_that_speak_in_turn_have_the_advantages_of_one_that_says_all(turn_discount: float, decay: float) -> None:
    turns = [Turn(0, agent, [0.1, 0.0, float(agent)], [0.3, agent - 0.5, 0.2]) for agent in (0, 1, 0, 1)]
    columns, _ = rows_of([Turn(0, 0, turn.rewards, turn.values) for turn in turns])
    plain, _ = gae_advantages(
        columns["rewards"], columns["values"], columns["lengths"], discount=turn_discount, decay=decay
    )
    gains, _ = estimate(turns, level="token", turn_discount=turn_discount, token_discount=turn_discount, decay=decay)
    assert [gain for turn in gains for gain in turn] == pytest.approx(plain.tolist(), abs=1e-12)


@given(turn_lists)
def test_without_discounts_an_advantage_is_what_the_team_still_gets_minus_the_value(turns: list[Turn]) -> None:
    gains, returns = estimate(turns, level="token", turn_discount=1.0, decay=1.0)
    for place, turn in enumerate(turns):
        later = sum(sum(other.rewards) for other in turns[place + 1 :] if other.play == turn.play)
        for i in range(len(turn.rewards)):
            still = sum(turn.rewards[i:]) + later
            assert gains[place][i] == pytest.approx(still - turn.values[i], abs=1e-9)
            assert returns[place][i] == pytest.approx(still, abs=1e-9)


@pytest.mark.parametrize("level", ["token", "action"])
def test_advantages_of_agents_add_up_to_that_of_their_joint_action(level: Level) -> None:
    """A game of 2 x 3 actions with exact values: A(a1, a2) = A(a1) + A(a2 | a1), in double precision."""
    payoff = [[1.0, 0.0, -2.0], [0.5, 4.0, 0.25]]
    first, second = [0.25, 0.75], [[0.5, 0.25, 0.25], [0.125, 0.5, 0.375]]
    after = [sum(p * r for p, r in zip(*row, strict=True)) for row in zip(second, payoff, strict=True)]
    before = sum(p * v for p, v in zip(first, after, strict=True))
    for a, b in product(range(2), range(3)):
        turns = [Turn(0, 0, [0.0], [before]), Turn(0, 1, [payoff[a][b]], [after[a]])]
        gains, _ = estimate(turns, level=level, turn_discount=1.0, decay=0.0)
        assert gains == [[after[a] - before], [payoff[a][b] - after[a]]]
        assert gains[0][0] + gains[1][0] == payoff[a][b] - before
    expected = sum(first[a] * (after[a] - before) for a in range(2))
    assert expected == 0.0


@pytest.mark.parametrize("level", ["token", "action"])
@pytest.mark.parametrize("decay", [0.5, 1.0])
def test_a_turn_without_reward_or_advantage_keeps_its_place(level: Level, decay: float) -> None:
    """The discount counts it; code that takes 0 for missing leaves it out."""
    turns = [Turn(0, 0, [0.0], [0.0]), Turn(0, 1, [0.0], [0.0]), Turn(0, 0, [1.0], [0.0])]
    gains, _ = estimate(turns, level=level, turn_discount=0.5, decay=decay)
    assert gains == [[(0.5 * decay) ** 2], [0.5 * decay], [1.0]]


@given(turn_lists, st.sampled_from(["token", "action"]))
def test_plays_in_one_batch_have_the_advantages_that_they_have_alone(turns: list[Turn], level: Level) -> None:
    """So the link between two agents is never cut by the end of an earlier play."""
    settings = {"level": level, "turn_discount": 0.9, "decay": 0.8}
    together, _ = estimate(turns, **settings)
    for play in {turn.play for turn in turns}:
        apart, _ = estimate([turn for turn in turns if turn.play == play], **settings)
        mine = [gain for gain, turn in zip(together, turns, strict=True) if turn.play == play]
        for one, other in zip(mine, apart, strict=True):
            assert one == pytest.approx(other, abs=1e-12)


def test_whitening_counts_advantages_of_0_and_keeps_agents_apart() -> None:
    values = torch.tensor([0.0, 0.0, 3.0, 100.0, 0.0, torch.nan])
    is_counted = torch.tensor([True, True, True, True, True, False])
    actor = torch.tensor([0, 0, 0, 1, 1, 1])
    result = whitened_by_agent(values, is_counted, actor, 1e-8, lambda totals: totals)
    expected = [(v - 1) / 3**0.5 for v in (0, 0, 3)] + [(v - 50) / 5000**0.5 for v in (100, 0)] + [0.0]
    torch.testing.assert_close(result, torch.tensor(expected))
    halves = [slice(0, 1), slice(1, 6)]
    counts = []
    for half in halves:
        whitened_by_agent(values[half], is_counted[half], actor[half], 1e-8, lambda x: counts.append(x) or x)
    parts = [
        whitened_by_agent(values[half], is_counted[half], actor[half], 1e-8, lambda _: counts[0] + counts[1])
        for half in halves
    ]
    assert torch.equal(torch.cat(parts), result)


def test_an_agent_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="'actor' holds 64: an environment may have at most 64 agents"):
        whitened_by_agent(torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([64]), 1e-8, lambda x: x)


def test_advantages_are_fractions_whatever_the_type_of_masks_and_turns() -> None:
    """Code that stores them in a tensor like the mask cuts them to whole numbers."""
    gains, _ = estimate([Turn(0, 0, [0.7, -0.3], [0.0, 0.0])], level="token", turn_discount=1.0, decay=1.0)
    assert gains == [[pytest.approx(0.4), pytest.approx(-0.3)]]


def test_a_failed_reward_leaves_out_the_whole_play() -> None:
    advantage = ChainedGaeAdvantage(whiten="none")
    inputs = inputs_of(advantage)
    output = compute(advantage, inputs)
    rows = output.advantages.split(ROW_LENGTHS.tolist())
    assert not inputs.is_valid[3]
    assert inputs.column("joint_ids")[2] == inputs.column("joint_ids")[3], "the row's partner failed"
    assert not rows[2].any()
    values = inputs.column("values").split(ROW_LENGTHS.tolist())[2]
    assert torch.equal(output.columns["returns"].split(ROW_LENGTHS.tolist())[2], values), "the critic learns nothing"
    assert rows[0].any()


def test_a_discount_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="token_discount does nothing with level=action"):
        AlgorithmConfig.model_validate(
            {
                "advantage": {"type": "chained_gae", "level": "action", "token_discount": 0.9},
                "policy_loss": {"type": "ppo"},
            }
        )


def test_moments_of_one_value_give_no_advantage() -> None:
    assert Moments.of(Moments.count(torch.tensor([2.0]), torch.tensor([True]))).std == 0
    one = torch.ones(1, dtype=torch.bool)
    assert not whitened_by_agent(torch.tensor([2.0]), one, torch.tensor([0]), 1e-8, lambda x: x).any()
