"""GDPO next to a naive loop, worked by hand, and what must not change it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.recipes import make_recipe
from torch import Tensor

from leaderless.algorithms import AdvantageInputs
from leaderless.algorithms.advantage import compute
from leaderless.algorithms.advantages.gdpo import GdpoAdvantage
from leaderless.algorithms.advantages.grpo import grpo_advantages

WEIGHTS = {"right": 1.0, "short": 0.5, "kind": -2.0}
EPSILON = 1e-6
Row = tuple[int, bool, list[float | None]]
"""Group of a response, whether its reward is valid, and its rewards in the order of the weights."""


def inputs_of(rows: list[Row], sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values) -> AdvantageInputs:
    names = [*WEIGHTS]
    details = tuple(
        {
            name: {"value": value} if valid else {"error": "?"}
            for name, value in zip(names, parts, strict=True)
            if value is not None
        }
        for _, valid, parts in rows
    )
    totals = [
        sum(WEIGHTS[name] * (value or 0.0) for name, value in zip(names, parts, strict=True)) if valid else 0.0
        for _, valid, parts in rows
    ]
    rewards, count = torch.tensor(totals, dtype=torch.float32), len(rows)
    is_valid = torch.tensor([valid for _, valid, _ in rows], dtype=torch.bool)
    return AdvantageInputs(
        rewards=rewards,
        final_rewards=rewards,
        penalties=torch.zeros(count),
        is_valid=is_valid,
        is_trained=is_valid,
        lengths=torch.ones(count, dtype=torch.int64),
        group_ids=torch.tensor([group for group, _, _ in rows], dtype=torch.int64),
        episode_ids=torch.arange(count),
        columns={"reward_details": details},
        sum_over_ranks=sum_over_ranks,
        step=1,
        reward_weights=WEIGHTS,
    )


def gdpo(rows: list[Row], **settings: bool) -> list[float]:
    return compute(GdpoAdvantage.model_validate(settings), inputs_of(rows)).advantages.tolist()


def naive(rows: list[Row]) -> list[float]:
    """One reward and one group at a time, in plain Python."""
    sums = [0.0] * len(rows)
    for place, weight in enumerate(WEIGHTS.values()):
        for group in {group for group, _, _ in rows}:
            members = [i for i, row in enumerate(rows) if row[0] == group and row[1] and row[2][place] is not None]
            values = [float(rows[i][2][place] or 0.0) for i in members]
            if len(set(values)) < 2:
                continue
            for i, value in zip(members, values, strict=True):
                sums[i] += weight * (value - fmean(values)) / (stdev(values) + EPSILON)
    valid = [total for total, row in zip(sums, rows, strict=True) if row[1]]
    deviation = stdev(valid) if len(valid) > 1 else 0.0
    return [total / (deviation + EPSILON) if row[1] else 0.0 for total, row in zip(sums, rows, strict=True)]


value = st.sampled_from([0.0, 0.25, 1.0, 7.0])


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.lists(value, min_size=3, max_size=3)), max_size=16),
    absent=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2))),
)
def test_gdpo_equals_a_naive_loop(rows: list[Row], absent: set[tuple[int, int]]) -> None:
    # A reward applies to a whole group or to none of it.
    rows = [(g, v, [None if (g, k) in absent else x for k, x in enumerate(parts)]) for g, v, parts in rows]
    assert gdpo(rows) == pytest.approx(naive(rows), rel=1e-4, abs=1e-4)


def test_gdpo_worked_by_hand_tells_apart_what_has_one_advantage_in_grpo() -> None:
    both: list[Row] = [(0, True, [1.0, 1.0, None]), (0, True, [0.0, 0.0, None])]
    one: list[Row] = [(1, True, [1.0, 0.0, None]), (1, True, [0.0, 0.0, None])]
    root = math.sqrt(0.5)  # (1 - 1/2) / std of {0, 1}
    assert gdpo(both, normalize_over_step=False) == pytest.approx([1.5 * root, -1.5 * root], rel=1e-5)
    assert gdpo(one, normalize_over_step=False) == pytest.approx([root, -root], rel=1e-5)
    # Over the step: {1.5, -1.5, 1, -1} / sqrt(2), of which the sum of squares is 3.25, over n - 1 = 3.
    expected = [x * root / math.sqrt(3.25 / 3) for x in (1.5, -1.5, 1.0, -1.0)]
    assert gdpo([*both, *one]) == pytest.approx(expected, rel=1e-5)
    same = inputs_of([*both, *one])
    grpo = grpo_advantages(same.rewards, same.is_valid, same.group_ids, EPSILON)
    assert grpo.tolist() == pytest.approx([root, -root] * 2, rel=1e-4)


def test_the_example_of_the_page_is_right() -> None:
    page = (Path(__file__).parents[3] / "docs/algorithms/gdpo.md").read_text(encoding="utf-8").replace("\u2212", "-")
    table = re.findall(r"^\| ([01]) \| ([\d.]+) \| ([\d.]+) \| (-?[\d.]+) \| (-?[\d.]+) \|$", page, re.M)
    rights, shorts, sums, grpo, expected = (list(map(float, column)) for column in zip(*table, strict=True))
    rows: list[Row] = [(0, True, [right, 2 * short, None]) for right, short in zip(rights, shorts, strict=True)]
    same = inputs_of(rows)  # whose second weight is 0.5
    assert same.rewards.tolist() == pytest.approx(sums)
    theirs = grpo_advantages(same.rewards, same.is_valid, same.group_ids, EPSILON)
    assert theirs.tolist() == pytest.approx(grpo, abs=0.006)
    halved = [0.433, 1.299, -1.299, -0.433]
    assert gdpo(rows, normalize_over_step=False) == pytest.approx(halved, abs=1e-3)
    root = math.sqrt(0.75)  # (1 - 1/2) / std of {1, 1, 0, 0}
    assert expected == pytest.approx([0.0, 2 * root, -2 * root, 0.0], abs=0.006)


def test_a_single_reward_is_grpo_but_for_the_last_division() -> None:
    rows: list[Row] = [(i // 4, i != 5, [float(i * i % 7), None, None]) for i in range(12)]
    inputs = inputs_of(rows)
    grpo = grpo_advantages(inputs.rewards, inputs.is_valid, inputs.group_ids, EPSILON)
    assert gdpo(rows, normalize_over_step=False) == pytest.approx(grpo.tolist(), abs=1e-6)
    scale = grpo[inputs.is_valid].double().std().item()
    assert gdpo(rows) == pytest.approx((grpo / scale).tolist(), rel=1e-4, abs=1e-6)


def test_equal_rewards_have_no_advantage_and_do_not_dilute_the_others() -> None:
    equal: list[Row] = [(0, True, [1.0, 0.1, 3.0])] * 3
    assert gdpo(equal) == [0.0] * 3
    rows: list[Row] = [(0, True, [float(i), None, None]) for i in range(4)]
    with_equal: list[Row] = [(g, v, [parts[0], 0.1, None]) for g, v, parts in rows]
    assert gdpo(with_equal) == gdpo(rows)


def test_the_unit_of_a_reward_does_not_matter_and_its_weight_does() -> None:
    rows: list[Row] = [(i // 4, True, [float(i * i % 5), float(i % 3), None]) for i in range(8)]
    scaled: list[Row] = [(g, v, [100.0 * (parts[0] or 0.0), parts[1], None]) for g, v, parts in rows]
    assert gdpo(scaled) == pytest.approx(gdpo(rows), rel=1e-4)
    swapped: list[Row] = [(g, v, [parts[1], parts[0], None]) for g, v, parts in rows]
    assert gdpo(swapped) != pytest.approx(gdpo(rows), rel=1e-2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gdpo_does_not_depend_on_the_ranks_that_groups_are_on(world_size: int) -> None:
    rows: list[Row] = [(i // 4, i % 7 != 3, [float(i * i % 5), float(i % 3), i / 10]) for i in range(32)]
    whole = gdpo(rows)
    parts = [[row for row in rows if row[0] % world_size == rank] for rank in range(world_size)]
    counts: list[Tensor] = []

    def counted(values: Tensor) -> Tensor:
        counts.append(values)
        return values

    for part in parts:
        compute(GdpoAdvantage(), inputs_of(part, counted))
    total = torch.stack(counts).sum(0)
    for rank, part in enumerate(parts):
        found = compute(GdpoAdvantage(), inputs_of(part, lambda _: total)).advantages.tolist()
        expected = [one for one, row in zip(whole, rows, strict=True) if row[0] % world_size == rank]
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_reward_that_another_stage_has_changed_is_refused() -> None:
    inputs = inputs_of([(7, True, [1.0, 0.0, 0.0]), (7, True, [0.0, 0.0, 0.0])])
    changed = AdvantageInputs(**{**vars(inputs), "rewards": inputs.rewards - 0.25})
    with pytest.raises(
        ValueError, match=r"group 7 has the reward 0.75, but its rewards \(right, short, kind\) sum to 1"
    ):
        compute(GdpoAdvantage(), changed)


@pytest.mark.parametrize(
    "algorithm", [{"kl": {"coefficient": 0.1, "place": "reward"}}, {"overlong": {"buffer_tokens": 2}}]
)
def test_penalties_in_the_reward_are_refused(algorithm: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="normalizes each reward on its own"):
        make_recipe(algorithm={"advantage": {"type": "gdpo"}, **algorithm})
