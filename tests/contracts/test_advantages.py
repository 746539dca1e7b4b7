"""The contract of every advantage, built-in or a user's `package.module:Class`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import ClassVar

import pytest
import torch
from tests.end_to_end.own_algorithm import OwnAdvantage
from torch import Tensor

from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.advantage import compute
from leaderless.algorithms.advantages import ADVANTAGES

LENGTHS = torch.tensor([4, 2, 1, 6, 3, 0, 2, 5])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 1.0, 0.0, 3.0])
IS_VALID = torch.tensor([True, True, True, False, True, True, True, True])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
PENALTIES = 0.1 * torch.arange(23.0).sin() * IS_VALID.repeat_interleave(LENGTHS)
SETTINGS = {"pass_at_k": {"k": 2}}
CASES: dict[str, Advantage] = {
    **{name: kind.model_validate(SETTINGS.get(name, {})) for name, kind in ADVANTAGES.items()},
    "reinforce_pp with baseline": ADVANTAGES["reinforce_pp"].model_validate({"group_baseline": True}),
    "gae without whitening": ADVANTAGES["gae"].model_validate({"whiten": False, "decay": 0.9}),
    "chained_gae by actions": ADVANTAGES["chained_gae"].model_validate({"level": "action", "turn_discount": 0.9}),
    "chained_gae without whitening": ADVANTAGES["chained_gae"].model_validate({"whiten": "none", "decay": 0.9}),
    "srpo by task": ADVANTAGES["srpo"].model_validate({"task": "level"}),
    "custom": OwnAdvantage(type="tests.end_to_end.own_algorithm:OwnAdvantage"),
}
"""Every advantage, with settings that find something to learn."""


def columns() -> dict[str, object]:
    """Columns that advantages read."""
    noise = torch.Generator().manual_seed(1)
    per_token = ("values", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    return {
        **{name: torch.randn(len(PENALTIES), generator=noise) for name in per_token},
        "is_greedy": torch.tensor([False, False, True, False, True, False, True, False]),
        "worth": torch.linspace(0.5, 1.5, len(REWARDS)),
        "policy_versions": torch.zeros(len(PENALTIES), dtype=torch.int32),
        "prompt_tokens": tuple(torch.arange(3 + group) for group in GROUPS.tolist()),
        "joint_ids": torch.tensor([8, 8, 3, 3, 5, 5, 9, 10]),
        "actor": torch.tensor([0, 1, 0, 1, 1, 0, 0, 0]),
        "turns": torch.tensor([0, 0, 2, 2, 1, 1, 0, 1, 1, 1, 3, 3, 3, 1, 3, 3, 0, 0, 1, 1, 3, 3, 3], dtype=torch.int32),
        "final_values": torch.linspace(-1.0, 1.0, len(REWARDS)),
        "truncated": torch.tensor([False, True, False, True, True, False, False, True]),
        "env_steps": torch.cat([torch.arange(length, dtype=torch.int32) for length in LENGTHS.tolist()]),
        "turn_rewards": torch.zeros(int(LENGTHS.sum())),
        "env_rewards": tuple(torch.linspace(0.0, 1.0, length) for length in LENGTHS.tolist()),
        "embeddings": torch.randn(len(REWARDS), 3, generator=noise),
        "success": torch.tensor([True, False, False, True, False, True, False, False]),
        "reward_details": details(REWARDS),
        "rows": tuple({"question": str(group), "level": group % 2} for group in GROUPS.tolist()),
    }


def details(rewards: Tensor) -> tuple[object, ...]:
    """Two rewards of each response that sum to the given one, with weights 1 and 2; neither where it failed."""
    parts = torch.linspace(0.0, 1.0, len(rewards)).sin()
    return tuple(
        {"one": {"value": float(total - 2 * part)}, "two": {"value": float(part)}} if valid else {"one": {"error": "?"}}
        for total, part, valid in zip(rewards, parts, IS_VALID.tolist(), strict=True)
    )


def inputs_of(advantage: Advantage, rewards: Tensor = REWARDS) -> AdvantageInputs:
    penalties = torch.zeros_like(PENALTIES) if advantage.judges else PENALTIES
    final = torch.where(IS_VALID, rewards, 0.0)
    totals = torch.stack([part.sum() for part in penalties.split(LENGTHS.tolist())])
    found = columns()
    return AdvantageInputs(
        rewards=final - totals,
        final_rewards=final,
        penalties=penalties,
        is_valid=IS_VALID,
        is_trained=IS_VALID,
        lengths=LENGTHS,
        group_ids=GROUPS,
        episode_ids=torch.arange(len(REWARDS)),
        columns={name: found[name] for name in advantage.reads},  # type: ignore[misc]
        sum_over_ranks=lambda values: values,
        step=1,
        reward_weights={"one": 1.0, "two": 2.0},
    )


def part(inputs: AdvantageInputs, order: list[int]) -> AdvantageInputs:
    """Some responses in a given order."""
    rows = torch.arange(len(PENALTIES)).split(LENGTHS.tolist())
    tokens = torch.cat([rows[row] for row in order])

    def taken(values: object) -> object:
        if isinstance(values, tuple):
            return tuple(values[row] for row in order)
        if isinstance(values, Tensor):
            return values[tokens] if len(values) == len(PENALTIES) else values[order]
        return values

    changed = {field.name: taken(getattr(inputs, field.name)) for field in fields(inputs)}
    chosen = {name: taken(values) for name, values in inputs.columns.items()}
    return replace(inputs, **{**changed, "columns": chosen})


@pytest.mark.parametrize("name", CASES)
def test_an_advantage_has_the_declared_shape_and_is_0_where_the_reward_failed(name: str) -> None:
    advantage = CASES[name]
    output = compute(advantage, inputs_of(advantage))
    is_counted = IS_VALID.repeat_interleave(LENGTHS) if advantage.is_per_token else IS_VALID
    assert output.advantages.shape == is_counted.shape
    assert output.advantages.dtype == torch.float32
    assert output.advantages.isfinite().all()
    assert output.advantages.any(), "there is something to learn"
    assert not output.advantages[~is_counted].any()


@pytest.mark.parametrize("name", CASES)
def test_an_advantage_depends_on_the_order_neither_of_responses_nor_of_groups(name: str) -> None:
    advantage = CASES[name]
    inputs = inputs_of(advantage)
    rows = compute(advantage, inputs)
    for order in ([7, 2, 0, 5, 1, 3, 6, 4], [4, 5, 6, 7, 0, 1, 2, 3]):
        other = compute(advantage, part(inputs, order))
        expected = part(replace(inputs, columns={"advantages": rows.advantages, **rows.columns}), order).columns
        torch.testing.assert_close(other.advantages, expected["advantages"])
        for column in advantage.writes:
            torch.testing.assert_close(other.columns[column], expected[column])


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].is_per_token])
def test_a_failed_reward_changes_no_other_advantage(name: str) -> None:
    advantage = CASES[name]
    one, other = (compute(advantage, inputs_of(advantage, torch.where(IS_VALID, REWARDS, x))) for x in (-99.0, 7.0))
    assert torch.equal(one.advantages, other.advantages)
    poisoned = replace(inputs_of(advantage), rewards=torch.where(IS_VALID, inputs_of(advantage).rewards, torch.nan))
    assert torch.equal(compute(advantage, poisoned).advantages, one.advantages)


class Wrong(Advantage):
    """An advantage that does not keep to what it declares."""

    returned: str

    writes: ClassVar[tuple[str, ...]] = ("returns",)

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        right = AdvantageOutput(inputs.rewards, {"returns": inputs.penalties})
        return {
            "too few": replace(right, advantages=inputs.rewards[1:]),
            "tokens": replace(right, advantages=inputs.penalties),
            "one for each response": replace(right, columns={"returns": inputs.rewards}),
            "no column": replace(right, columns={}),
            "another column": replace(right, columns={**right.columns, "values": inputs.penalties}),
            "a metric": replace(right, metrics={"own/mean": inputs.rewards}),
        }[self.returned]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("too few", r"returned advantages of shape \[7\]: there must be one value for each response, \[8\]"),
        ("tokens", r"returned advantages of shape \[23\]: there must be one value for each response, \[8\]"),
        ("one for each response", r"the column 'returns' of shape \[8\]: .* each response token, \[23\]"),
        ("no column", r"returned the writes \[\], but declares \['returns'\]"),
        ("another column", r"returned the writes \['returns', 'values'\]"),
        ("a metric", r"returned the metrics \['own/mean'\], but declares \[\]: name in `metrics`"),
    ],
)
def test_a_class_that_returns_something_else_than_it_declares_is_named(returned: str, message: str) -> None:
    advantage = Wrong(type="m:Wrong", returned=returned)
    with pytest.raises(ValueError, match=message):
        compute(advantage, inputs_of(advantage))
