"""Advantages of teams without a critic: Dr. MAS, MAGRPO, and the baseline of each role."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.contracts.test_advantages import inputs_of, part

from leaderless.algorithms import Advantage, AdvantageInputs
from leaderless.algorithms.advantage import compute
from leaderless.algorithms.advantages.dr_mas import DrMasAdvantage
from leaderless.algorithms.advantages.grpo import GrpoAdvantage
from leaderless.algorithms.advantages.magrpo import MagrpoAdvantage
from leaderless.algorithms.advantages.rae import RoleBaselineAdvantage

Row = tuple[int, int, float, bool]
"""Play, agent, reward, and whether it is valid; a group has two plays."""
rows = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans()),
    min_size=1,
    max_size=14,
    unique_by=lambda row: row[:2],
)


def given_rows(some: list[Row], state: dict[str, float] | None = None, step: int = 1) -> AdvantageInputs:
    plays, actor, rewards, valid = (torch.tensor(column) for column in zip(*some, strict=True))
    rewards = torch.where(valid, rewards, torch.nan)
    lengths = torch.ones_like(plays)
    return AdvantageInputs(
        rewards=rewards,
        final_rewards=rewards,
        penalties=torch.zeros(len(plays)),
        is_valid=valid,
        is_trained=valid,
        lengths=lengths,
        group_ids=plays // 2 * 10,
        episode_ids=torch.arange(len(plays)),
        columns={"joint_ids": plays + 40, "actor": actor},
        sum_over_ranks=lambda values: values,
        step=step,
        state={} if state is None else state,
    )


def teams(some: list[Row]) -> dict[int, float | None]:
    """The reward of each play; None if one of its rewards failed."""
    members = {play: [row for row in some if row[0] == play] for play, *_ in some}
    return {play: sum(row[2] for row in own) if all(row[3] for row in own) else None for play, own in members.items()}


def relative(rewards: list[float], own: float | None) -> float:
    if own is None or len(rewards) < 2 or len(set(rewards)) == 1:
        return 0.0
    return (own - fmean(rewards)) / (stdev(rewards) + 1e-6)


@given(rows)
def test_dr_mas_compares_an_agent_with_itself(some: list[Row]) -> None:
    for kind in ("own", "team"):
        worth = {
            (play, agent): teams(some)[play] if kind == "team" else reward if valid else None
            for play, agent, reward, valid in some
        }
        expected = []
        for play, agent, *_ in some:
            siblings = [v for (p, a), v in worth.items() if p // 2 == play // 2 and a == agent and v is not None]
            expected.append(relative(siblings, worth[play, agent]))
        result = compute(DrMasAdvantage(reward=kind), given_rows(some)).advantages
        torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=1e-5)


@given(rows)
def test_magrpo_compares_plays_each_of_which_counts_once(some: list[Row]) -> None:
    worth = teams(some)
    expected = [
        relative([v for p, v in worth.items() if p // 2 == play // 2 and v is not None], worth[play])
        for play, *_ in some
    ]
    result = compute(MagrpoAdvantage(), given_rows(some)).advantages
    torch.testing.assert_close(result, torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_rewards_of_another_scale_do_not_drown_an_agent() -> None:
    """What Dr. MAS is for: with statistics over all agents, the planner's advantages nearly vanish."""
    some = [(0, 0, 0.0, True), (0, 1, 100.0, True), (1, 0, 1.0, True), (1, 1, 200.0, True)]
    own = compute(DrMasAdvantage(reward="own"), given_rows(some)).advantages
    pooled = compute(GrpoAdvantage(), given_rows(some)).advantages
    assert own.tolist() == pytest.approx([-(0.5**0.5), -(0.5**0.5), 0.5**0.5, 0.5**0.5], abs=1e-4)
    assert abs(float(pooled[2] - pooled[0])) < 0.02


def test_a_role_is_compared_with_what_it_got_before_and_the_baseline_moves_once_in_a_step() -> None:
    advantage, state = RoleBaselineAdvantage(momentum=0.5), dict[str, float]()
    first = [(0, 0, 1.0, True), (1, 0, 0.0, True), (0, 1, 4.0, True), (1, 1, 9.0, False)]
    output = compute(advantage, given_rows(first, state))
    assert output.advantages.tolist() == [0.5, -0.5, 0.0, 0.0], "a role begins with the mean of its first step"
    assert state == {"baseline/0": 0.5, "baseline/1": 4.0}
    second = [(0, 0, 1.0, True), (1, 0, 1.0, True)]
    output = compute(advantage, given_rows(second, state))
    assert output.advantages.tolist() == [0.5, 0.5]
    assert output.metrics["agents/baseline"].tolist() == [0.5, 0.5]
    assert state == {"baseline/0": 0.75, "baseline/1": 4.0}, "an agent that does not play keeps its baseline"
    output = compute(advantage, given_rows(second, state))
    assert output.advantages.tolist() == [0.25, 0.25]


def test_the_baseline_of_a_team_is_that_of_the_sum_of_its_rewards() -> None:
    some = [(0, 0, 1.0, True), (0, 1, 3.0, True), (1, 0, 0.0, True), (1, 1, 0.0, False)]
    output = compute(RoleBaselineAdvantage(reward="team"), given_rows(some, state := {"baseline/0": 1.0}))
    assert output.advantages.tolist() == [3.0, 0.0, 0.0, 0.0]
    assert state["baseline/0"] == pytest.approx(0.95 + 0.05 * 4.0)


@pytest.mark.parametrize("advantage", [DrMasAdvantage(), MagrpoAdvantage(), RoleBaselineAdvantage()])
def test_team_advantages_do_not_depend_on_the_number_of_ranks(advantage: Advantage) -> None:
    """Plays of a group are on one rank, groups on any."""
    inputs = inputs_of(advantage)
    expected = compute(advantage, replace(inputs, state=(state := {})))
    parts, counts = [[0, 1, 2, 3], [4, 5, 6, 7]], list[torch.Tensor]()
    for rows_ in parts:
        compute(advantage, replace(part(inputs, rows_), sum_over_ranks=lambda x: counts.append(x) or x, state={}))
    states, found = [], []
    for rows_ in parts:
        own = dict[str, float]()
        total = sum(counts) if counts else torch.zeros(())
        found.append(compute(advantage, replace(part(inputs, rows_), sum_over_ranks=lambda _: total, state=own)))  # noqa: B023
        states.append(own)
    torch.testing.assert_close(torch.cat([one.advantages for one in found]), expected.advantages)
    assert states[0] == states[1]
    assert states[0] == pytest.approx(state)
