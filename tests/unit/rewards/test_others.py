"""Rewards written for TRL and verl give the same numbers here."""

from __future__ import annotations

from pathlib import Path

import pytest

from leaderless.config import RecipeError
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.protocol import GradingOutcome, RewardInput, grade
from leaderless.rewards.registry import check_rewards, make_rewards

HERE = "tests.unit.rewards.test_others"
MESSAGES = [{"role": "user", "content": "2+2?"}]


def by_length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def places(completions, **kwargs):
    return [float(sorted(completions).index(one)) for one in completions]


def of_chats(prompts, completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert prompts[0][-1]["role"] == "user"
    assert "prompt" not in kwargs
    return [1.0 if content == right else 0.0 for content, right in zip(contents, solution, strict=True)]


def few_columns(completions, level):
    return [2.0 * one for one in level]


def sometimes_none(completions, **kwargs):
    return [None for _ in completions]


def no_list(completions, **kwargs):
    return 1.0


def too_many(completions, **kwargs):
    return [1.0, 2.0]


def wants_ids(completions, completion_ids, **kwargs):
    return [1.0]


def may_want_ids(completions, completion_ids=None, **kwargs):
    return [1.0 if completion_ids is None else 0.0]


async def later(completions, **kwargs):
    return [1.0]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info == {"index": 3}
    return float(data_source == "gsm8k" and solution_str.endswith(ground_truth))


def score_dict(solution_str, ground_truth, **kwargs):
    return {"score": 0.5, "acc": True, "pred": solution_str}


def no_score(solution_str, ground_truth):
    return {"acc": 1.0}


def outcome(name: str, prompt: object = "2+2=", response: str = "4", **row: object) -> GradingOutcome:
    sample = RewardInput(prompt, response, None, {"prompt": prompt, **row}, is_truncated=False)  # type: ignore[arg-type]
    reward = make_rewards(RewardsConfig.model_validate({f"{HERE}:{name}": 1.0}))[f"{HERE}:{name}"]
    (graded,) = grade(reward, [sample])
    return graded._replace(seconds=0.0)


def test_a_function_of_lists_grades_one_completion() -> None:
    assert outcome("by_length", response="four") == GradingOutcome(4.0)


def test_a_function_of_lists_gets_all_completions_at_once() -> None:
    reward = make_rewards(RewardsConfig.model_validate({f"{HERE}:places": 1.0}))[f"{HERE}:places"]
    samples = [RewardInput("?", response, None, {"row": 1}, is_truncated=False) for response in ("c", "a", "b")]
    assert [one.value for one in grade(reward, samples)] == [2.0, 0.0, 1.0]


def test_columns_and_chats_arrive_as_trl_passes_them() -> None:
    assert outcome("of_chats", MESSAGES, solution="4", other=1).value == 1
    assert outcome("of_chats", MESSAGES, response="5", solution="4").value == 0


def test_a_function_without_kwargs_gets_the_columns_that_it_names() -> None:
    assert outcome("few_columns", level=3, other=1).value == 6


def test_none_counts_as_nothing_in_the_sum() -> None:
    assert outcome("sometimes_none") == GradingOutcome(0.0)


@pytest.mark.parametrize(("name", "what"), [("no_list", "1.0"), ("too_many", "[1.0, 2.0]")])
def test_what_is_no_list_of_one_number_fails(name: str, what: str) -> None:
    error = outcome(name).error or ""
    assert f"returned {what} for 1 completions, but must return a list with a number for each" in error


def test_what_rewards_do_not_get_is_refused_unless_it_has_a_default() -> None:
    with pytest.raises(RecipeError, match="takes completion_ids, which rewards do not get here: give it a default"):
        check_rewards(RewardsConfig.model_validate({f"{HERE}:wants_ids": 1.0}))
    assert outcome("may_want_ids").value == 1
    with pytest.raises(RecipeError, match="must be a plain function"):
        check_rewards(RewardsConfig.model_validate({f"{HERE}:later": 1.0}))


def test_a_score_of_verl_sees_the_row_as_verl_prepares_it() -> None:
    row = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 3}}
    assert outcome("compute_score", response="it is 4", **row) == GradingOutcome(1.0)
    assert outcome("compute_score", response="it is 5", **row) == GradingOutcome(0.0)


def test_a_dictionary_of_verl_has_the_score_and_the_answer() -> None:
    assert outcome("score_dict") == GradingOutcome(0.5, "4")
    assert "returned a dictionary without 'score': ['acc']" in str(outcome("no_score").error)


def test_rewards_of_another_form_are_called_as_before(tmp_path: Path) -> None:
    name = "tests.unit.reward_functions:length"
    reward = make_rewards(RewardsConfig.model_validate({name: 1.0}))[name]
    assert grade(reward, [RewardInput("", "four", None, {}, is_truncated=False)])[0].value == 4
