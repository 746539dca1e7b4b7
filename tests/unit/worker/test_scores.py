"""Scores of an evaluation from graded responses."""

from __future__ import annotations

import pytest
from tests.unit.recipes import make_recipe

from leaderless.rewards.pool import Graded
from leaderless.worker.evaluate.evaluator import ResponseScores


class Alone:
    """One rank."""

    def sum(self, values, what):  # noqa: ARG002
        """The sum over one rank."""
        return values

    def max(self, values, what):  # noqa: ARG002
        """The maximum over one rank."""
        return values


def graded(**values: float | str) -> Graded:
    """A response by reward: its value, or `value answer`."""
    details = {}
    for name, value in values.items():
        number, _, answer = str(value).partition(" ")
        details[name] = {"value": float(number)} | ({"answer": answer} if answer else {})
    return Graded(0.0, is_valid=True, details=details)


FAILED = Graded(0.0, is_valid=False, details={"math": {"error": "TimeoutError"}})


def scores(prompts: list[list[Graded]], metric: str | None = None, **rewards: object) -> dict[str, float]:
    rewards = rewards or {"math": 1.0, "exact_match": 0.5}
    evaluation = {"responses_per_prompt": len(prompts[0]), "temperature": 1.0, "metric": metric}
    result = ResponseScores(make_recipe(reward=rewards, evaluation=evaluation))
    for prompt in prompts:
        result.add(prompt)
    return result.numbers(result.metrics.reduce(Alone()))


def test_a_prompt_without_any_answer_has_a_wrong_majority():
    right, silent = [graded(math="1 42")] * 2, [graded(math="0")] * 2
    assert scores([right, silent]) == {
        "evaluation/mean@2": 0.5,
        "evaluation/pass@2": 0.5,
        "evaluation/maj@2": 0.5,
        "evaluation/failed": 0,
    }


def test_rewards_that_find_no_answers_have_no_majority():
    assert "evaluation/maj@2" not in scores([[graded(math=1.0)] * 2])


def test_each_row_is_judged_by_the_rewards_that_apply_to_it():
    prompts = [[graded(math=1.0)], [graded(exact_match=1.0)], [graded(math=0.0, exact_match=1.0)]]
    assert scores(prompts)["evaluation/mean@1"] == pytest.approx(2 / 3)


def test_responses_that_a_named_metric_does_not_apply_to_are_left_out_and_counted():
    result = scores([[graded(math=1.0)], [graded(exact_match=1.0)]], metric="math")
    assert result == {"evaluation/mean@1": 1.0, "evaluation/failed": 0, "evaluation/not_applicable": 1}


def test_failed_responses_are_left_out_and_counted():
    result = scores([[graded(math=1.0), FAILED]])
    assert result == {"evaluation/mean@2": 1.0, "evaluation/failed": 1}


@pytest.mark.parametrize(("k", "powers"), [(1, []), (2, [2]), (4, [2, 4]), (10, [2, 4, 8, 10])])
def test_pass_at_k_is_given_for_powers_of_two_and_for_k_itself(k, powers):
    names = scores([[graded(math="1 7")] * k])
    assert [name for name in names if name.startswith("evaluation/pass@")] == [f"evaluation/pass@{j}" for j in powers]
