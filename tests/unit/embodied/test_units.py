"""What has a log-probability of its own in the decisions of a body, against loops over steps and numbers."""

from __future__ import annotations

import pytest
import torch

from leaderless.config.environment import Grain
from leaderless.embodied.training.decision_units import DecisionUnits, grained

EXECUTED = [[3, 3, 1], [], [2], [3, 2]]
NUMBERS, CHUNK = 2, 3


Unit = tuple[int, int, int, list[tuple[int, int]], list[int]]


def naive(grain: Grain) -> list[list[Unit]]:
    """Of each episode, its units: decision, turn, last step, what is summed, and the steps whose reward it gets."""
    found: list[list[Unit]] = []
    decision = 0
    for counts in EXECUTED:
        units: list[Unit] = []
        step = 0
        for turn, count in enumerate(counts):
            cells = [[(c, d) for d in range(NUMBERS)] for c in range(count)]
            steps = list(range(step, step + count))
            if grain == "chunk":
                units += [(decision, turn, steps[-1], [cell for row in cells for cell in row], steps)]
            elif grain == "action":
                units += [(decision, turn, steps[c], cells[c], [steps[c]]) for c in range(count)]
            else:
                units += [
                    (decision, turn, steps[c], [(c, d)], [steps[c]] if d == NUMBERS - 1 else [])
                    for c in range(count)
                    for d in range(NUMBERS)
                ]
            step, decision = step + count, decision + 1
        found.append(units)
    return found


@pytest.mark.parametrize("grain", ["token", "action", "chunk"])
def test_units_are_those_of_loops(grain: Grain) -> None:
    units = DecisionUnits.of(grain, EXECUTED, NUMBERS)
    expected = naive(grain)
    assert units.lengths.tolist() == [len(row) for row in expected]
    flat = [unit for row in expected for unit in row]
    assert units.decisions.tolist() == [unit[0] for unit in flat]
    assert units.turns.tolist() == [unit[1] for unit in flat]
    assert units.steps.tolist() == [unit[2] for unit in flat]
    scores = torch.randn(sum(map(len, EXECUTED)), CHUNK, NUMBERS, dtype=torch.float64)
    found = grained(scores, grain, units.decisions, units.places)
    torch.testing.assert_close(
        found, torch.stack([torch.stack([scores[unit[0], c, d] for c, d in unit[3]]).sum() for unit in flat])
    )
    num_steps = torch.tensor([sum(row) for row in EXECUTED])
    rewards = torch.randn(int(num_steps.sum()))
    begins = (num_steps.cumsum(0) - num_steps).tolist()
    each = [sum(float(rewards[begins[e] + s]) for s in unit[4]) for e, row in enumerate(expected) for unit in row]
    torch.testing.assert_close(units.rewards(rewards, num_steps), torch.tensor(each))


@pytest.mark.parametrize("grain", ["token", "action", "chunk"])
def test_steps_that_were_not_executed_have_no_gradient(grain: Grain) -> None:
    units = DecisionUnits.of(grain, EXECUTED, NUMBERS)
    scores = torch.randn(sum(map(len, EXECUTED)), CHUNK, NUMBERS, requires_grad=True)
    grained(scores, grain, units.decisions, units.places).sum().backward()
    assert scores.grad is not None
    counts = torch.tensor([count for row in EXECUTED for count in row])
    is_executed = torch.arange(CHUNK) < counts[:, None]
    torch.testing.assert_close(scores.grad, is_executed[:, :, None].expand_as(scores).float())


def test_all_grains_have_one_sum() -> None:
    scores = torch.randn(6, CHUNK, NUMBERS, dtype=torch.float64)
    sums = []
    for grain in ("token", "action", "chunk"):
        units = DecisionUnits.of(grain, EXECUTED, NUMBERS)
        sums.append(grained(scores, grain, units.decisions, units.places).sum())
    torch.testing.assert_close(sums[0], sums[1])
    torch.testing.assert_close(sums[0], sums[2])


def test_nothing_at_all_has_no_units() -> None:
    units = DecisionUnits.of("token", [[]], NUMBERS)
    assert len(units.places) == 0
    assert units.lengths.tolist() == [0]
    assert len(units.rewards(torch.empty(0), torch.tensor([0]))) == 0
