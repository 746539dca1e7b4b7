"""Advantages that `leaderless verify` computes again: those of the run, from formulas written twice."""

from __future__ import annotations

import pytest
import torch
from tests.unit.recipes import make_recipe

from leaderless.algorithms.advantage import AdvantageInputs, compute
from leaderless.run.verify.advantages import FORMULAS, TOLERANCE, GroupMember, group_advantages, why_not

GROUPS = {
    "wrong and right": ([0.0, 1.0, 1.0, 0.0, 0.0], [3, 5, 1, 9, 2]),
    "graded": ([0.25, -1.5, 3.0, 1.0], [4, 4, 1, 6]),
    "all right": ([1.0, 1.0, 1.0], [1, 2, 3]),
    "one": ([1.0], [4]),
    "almost equal": ([1.0, 1.0 + 1e-4, 1.0], [2, 7, 3]),
}
SETTINGS = [{"type": name} for name in FORMULAS] + [{"type": "grpo", "normalize_by_std": False}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_formulas_give_the_advantages_of_the_run(settings: dict[str, object], group: str) -> None:
    rewards, lengths = GROUPS[group]
    advantage = make_recipe(algorithm={"advantage": settings}).algorithm.advantage
    count, total = len(rewards), sum(lengths)
    inputs = AdvantageInputs(
        rewards=torch.tensor(rewards),
        final_rewards=torch.tensor(rewards),
        penalties=torch.zeros(total),
        is_valid=torch.ones(count, dtype=torch.bool),
        is_trained=torch.ones(count, dtype=torch.bool),
        lengths=torch.tensor(lengths),
        group_ids=torch.zeros(count, dtype=torch.int64),
        episode_ids=torch.arange(count),
        columns={},
        sum_over_ranks=lambda values: values,
        step=1,
    )
    exact = torch.tensor(rewards).tolist()  # as float32, which a row holds
    members = [GroupMember(reward, length) for reward, length in zip(exact, lengths, strict=True)]
    found = group_advantages(members, advantage)
    assert found == pytest.approx(compute(advantage, inputs).advantages.tolist(), rel=TOLERANCE, abs=TOLERANCE)


def test_other_advantages_are_named_as_not_recomputed() -> None:
    assert why_not(make_recipe()) == ""
    assert "gpg are not recomputed" in why_not(make_recipe(algorithm={"advantage": {"type": "gpg"}}))
    shaped = make_recipe(algorithm={"overlong": {"buffer_tokens": 2}})
    assert "penalties for length" in why_not(shaped)
