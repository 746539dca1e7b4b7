"""The contract of every reward, built-in or a user's `package.module:function`. A built-in one joins by a case here."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from tests.judge_server import by_length, serving

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import RewardInput
from leaderless.rewards.registry import check_rewards
from leaderless.rewards.sandbox.sandboxes import Sandbox


@dataclass(frozen=True)
class Case:
    """A reward, and the values it should give.

    Attributes:
        answer: Answer of the row.
        good: Response that is worth more than the bad one.
        bad: Response that is worth less.
        options: Settings of the reward, without its weight.
        ungradable: Answer of a row that cannot be graded; the reward does not read it if it is the same.
    """

    answer: Json
    good: str
    bad: str
    options: dict[str, Json]
    ungradable: Json = None


ASSERTS = json.dumps({"asserts": "assert twice(2) == 4"})
REWARDS = {
    "math": Case("1/2", "so it is \\boxed{0.5}", "\\boxed{2}", {}),
    "exact_match": Case("12", " 12\n", "13", {}),
    "format": Case(None, "<a>", "a", {"pattern": "<.*>"}),
    "answer_match": Case("Tiko", "<answer> the tiko. </answer>", "Tiko", {}),
    "search_format": Case("Tiko", "<think>?</think><answer>Tiko</answer>", "<answer>Baro</answer>", {"structure": 0.3}),
    "judge": Case(None, "four", "ab", {"model": "m"}),
    "code": Case(ASSERTS, "def twice(n): return 2 * n", "def twice(n): return n", {}),
    "tests.end_to_end.own_reward:share_of_digits": Case(None, "12", "ab", {}),
    "tests.end_to_end.own_reward:fail_on_small_letters": Case(None, "12", "XY", {}),
}
RESPONSES = ["", " ", "\n\n", "ünïcödé ✓ \U0001f600", "\x00\x1b[2J", "[bold]", "9" * 5000, "\\boxed{", "```python\n"]
"""Text that a policy may write before it has learned anything."""


def grade(name: str, answer: Json, responses: list[str], num_processes: int) -> list[Graded]:
    if name == "code" and Sandbox().refusal(allow_weaker=False):
        pytest.skip("programs cannot be run safely on this machine")
    samples = [RewardInput("?", response, answer, {"answer": answer}, is_truncated=False) for response in responses]
    with ExitStack() as stack:
        own = {"url": stack.enter_context(serving(by_length)).url} if name == "judge" else {}
        config = RewardsConfig.model_validate({name: {"weight": 2.0, **REWARDS[name].options, **own}})
        return stack.enter_context(RewardPool(config, num_processes)).grade(samples, [None] * len(samples))


def test_every_built_in_reward_has_a_case() -> None:
    assert set(RewardsConfig.model_fields) <= set(REWARDS)


@pytest.mark.parametrize("name", REWARDS)
def test_a_better_response_is_worth_more_by_its_weight(name: str) -> None:
    case = REWARDS[name]
    good, bad = grade(name, case.answer, [case.good, case.bad], 0)
    assert good.is_valid
    assert bad.is_valid
    assert good.value > bad.value
    assert good.value == 2 * good.details[name]["value"]  # type: ignore[call-overload, index, operator]


@pytest.mark.parametrize("name", REWARDS)
def test_values_depend_on_the_response_alone(name: str) -> None:
    case = REWARDS[name]
    responses = [case.good, *(RESPONSES[-3:] if name == "code" else RESPONSES), case.bad]  # each code runs in a sandbox
    first = grade(name, case.answer, responses, 0)
    assert grade(name, case.answer, responses[::-1], 1) == first[::-1], "in another order, in another process"
    for graded in first:
        assert math.isfinite(graded.value)
        assert graded.is_valid or (graded.value == 0 and "error" in graded.details[name])  # type: ignore[operator]


@pytest.mark.parametrize("name", ["math", "exact_match", "answer_match", "search_format", "code"])
@pytest.mark.parametrize("answer", [None, "", {"no": "answer"}])
def test_a_row_that_cannot_be_graded_has_failed_and_is_not_worth_0(name: str, answer: Json) -> None:
    (graded,) = grade(name, answer, [REWARDS[name].good], 0)
    assert not graded.is_valid
    assert graded.details[name]["error"]  # type: ignore[call-overload, index]


def no_argument() -> float:
    return 0.0


async def later(sample: RewardInput) -> float:
    return 0.0


@pytest.mark.parametrize("function", ["no_argument", "later", "nothing", "RESPONSES"])
def test_a_function_that_cannot_be_a_reward_is_refused_with_its_name(function: str) -> None:
    name = f"{__name__}:{function}"
    with pytest.raises(RecipeError) as caught:
        check_rewards(RewardsConfig.model_validate({name: 1.0}))
    assert [problem.key for problem in caught.value.problems] == [f"reward.{name}"]
