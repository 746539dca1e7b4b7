"""Updates of one agent after the other: ratios of rounds, by hand and without an effect on the agent itself."""

from __future__ import annotations

import math

import pytest
import torch
from tests.unit.recipes import make_recipe

from leaderless.algorithms.team_plays import joint_ratios, rounds_of
from leaderless.config import Recipe
from leaderless.planner.workflow.stage_spec import has_turn, num_turns
from leaderless.planner.workflow.workflow import Node

JOINT_IDS, ACTOR = torch.tensor([5, 5, 9, 9]), torch.tensor([0, 1, 0, 1])
LENGTHS = torch.tensor([3, 2, 1, 1])
TURNS = torch.tensor([0, 0, 2, 1, 3, 0, 1], dtype=torch.int32)
"""Agent 0 speaks in turns 0 and 2 of the first play, agent 1 in turns 1 and 3; in the second each speaks once."""


def test_the_k_th_turns_of_all_agents_are_a_round() -> None:
    rounds = rounds_of(JOINT_IDS, ACTOR, TURNS, LENGTHS)
    assert rounds.tolist() == [0, 0, 1, 0, 1, 2, 2]
    order = torch.tensor([6, 5, 3, 4, 0, 1, 2])
    other = rounds_of(JOINT_IDS[[3, 2, 1, 0]], ACTOR[[3, 2, 1, 0]], TURNS[order], LENGTHS[[3, 2, 1, 0]])
    assert torch.equal(other, rounds[order])


def test_a_round_is_scaled_by_the_product_of_the_ratios_of_its_tokens() -> None:
    own = torch.tensor([True, True, True, False, False, True, False])
    change = torch.tensor([0.1, 0.2, -0.4, 99.0, math.nan, 5.0, -7.0])
    ratios = joint_ratios(change, own, rounds_of(JOINT_IDS, ACTOR, TURNS, LENGTHS), max_ratio=2.0)
    expected = [math.exp(0.3), math.exp(0.3), math.exp(-0.4), math.exp(0.3), math.exp(-0.4), 2.0, 2.0]
    assert ratios.tolist() == pytest.approx(expected)
    assert joint_ratios(-change, own, rounds_of(JOINT_IDS, ACTOR, TURNS, LENGTHS), max_ratio=4.0)[-1] == 0.25


def test_an_agent_without_a_turn_in_a_round_does_not_scale_it() -> None:
    rounds = rounds_of(torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([0, 1, 3]), torch.tensor([1, 2]))
    ratios = joint_ratios(torch.tensor([0.5, 0, 0]), torch.tensor([True, False, False]), rounds, max_ratio=2.0)
    assert ratios.tolist() == pytest.approx([math.exp(0.5), math.exp(0.5), 1.0])


def in_rotation(steps: int) -> Recipe:
    return make_recipe(algorithm={"team": {"rotate_steps": steps}})


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_roles_are_trained_in_rotation_and_the_first_one_first(steps: int) -> None:
    """The published code begins its rotation with different agents for different algorithms."""
    recipe, team = in_rotation(steps), ("a", "b", "c")
    nodes = {role: Node(role, "update", role=role, team=team) for role in team}
    for step in range(1, 30):
        turn = [role for role in team if has_turn(recipe, nodes[role], step)]
        assert turn == [team[(step - 1) // steps % 3]]
        counts = [num_turns(recipe, nodes[role], step) for role in team]
        assert counts == [sum((s - 1) // steps % 3 == place for s in range(1, step + 1)) for place in range(3)]


def test_without_rotation_every_role_is_trained_in_every_step() -> None:
    assert all(has_turn(in_rotation(0), Node("a", "update", role="a", team=("a", "b")), step) for step in (1, 2, 3))
