"""The value of each built-in reward for many responses."""

from __future__ import annotations

import math

import pytest
from tests.unit.rewards.calls import (
    make_sample,
)

from leaderless.base.values import Json
from leaderless.config.rewards import ExactMatchOptions, FormatOptions
from leaderless.rewards.math_reward import MathReward
from leaderless.rewards.protocol import RewardResult
from leaderless.rewards.text_rewards import ExactMatchReward, FormatReward


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("Janet has 16 - 3 - 4 = 9 eggs.\n#### 1,234", "So she makes $1,234.", "1.234"),
        ("Is the answer 7? No.\n#### 3\n#### 42", "the answer is 42", "7"),
        ("#### -5", "-5", "5"),
        (r"So $x = \boxed{\frac{1}{2}}$ holds.", r"\boxed{0.5}", r"\boxed{2}"),
        ("42", r"\boxed{42}", r"\boxed{43}"),
        (r"\frac{1}{2}", "1/2", "2"),
        (r"\dfrac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", r"\boxed{\sqrt{2}}"),
        ("$x$", "$x$", "$y$"),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", r"\boxed{x^2+1}"),
        (r"2\pi", r"$2\pi$", "2"),
        ("1e-3", "0.001", r"\boxed{1}"),
        ("3.", "3", "4"),
        ("The answer is 18.", "18", "19"),
        (r"The answer is \frac{1}{2}", "0.5", "2"),
        (r"$\frac{1}{2}$ cup", "0.5", "2"),
        ("50%", "0.5", "0.05"),
        ("(1,2)", "$(1,2)$", "$(2,1)$"),
        (42, "42", "43"),
        (0.5, r"\boxed{\frac{1}{2}}", "0.6"),
        (1e-3, "0.001", "0.002"),
    ],
)
def test_math_reads_expected_answers_as_datasets_write_them(expected: Json, right: str, wrong: str) -> None:
    reward = MathReward()
    assert reward(make_sample(right, expected)).value == 1.0
    assert reward(make_sample(wrong, expected)).value == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "#### 42 dollars",
        "#### 42 km/h",
        "#### **42**.",
        "#### 42,",
        "#### 42 (forty-two)",
        r"\boxed{42 dollars}",
        r"First \boxed{43}. Wait, that is wrong; so \boxed{42}",
        r"Step 1: \boxed{6}. Step 2: \boxed{7}. Thus \boxed{42}.",
        r"\boxed{43}. So the final answer is $42$.",
    ],
)
def test_the_last_answer_counts_without_what_writers_put_around_it(response: str) -> None:
    assert MathReward()(make_sample(response, "42")).value == 1
    assert MathReward()(make_sample(response, "43")).value == 0


def test_a_whole_number_and_a_fraction_are_one_number() -> None:
    assert MathReward()(make_sample("#### 2 1/2", "2.5")).value == 1
    assert MathReward()(make_sample("#### -2 1/2", "-2.5")).value == 1
    assert MathReward()(make_sample("#### 2 1/2", "1")).value == 0


@pytest.mark.parametrize("expected", [None, "", "  ", "18 = 9 * 2\n#### ", "}{", [42], {"a": 1}, True, math.nan])
def test_math_fails_without_a_usable_expected_answer(expected: Json) -> None:
    with pytest.raises(ValueError, match="expected answer"):
        MathReward()(make_sample("42", expected))


@pytest.mark.parametrize("response", ["", "  \n", "I do not know.", r"\boxed{}"])
def test_math_is_0_where_a_response_has_no_answer(response: str) -> None:
    assert MathReward()(make_sample(response, "42")) == RewardResult(0.0, None)


def test_math_takes_the_last_line_of_a_response_that_ends_as_gsm8k_does() -> None:
    response = "Is the answer 7? No.\nShe sold 48 / 2 = 24 in $5$ days.\n#### 1,072  \n"
    assert MathReward()(make_sample(response, "#### 1072")) == RewardResult(1.0, "1072")


@pytest.mark.parametrize(
    "ways",
    [
        ["0.5", r"\frac{1}{2}", "1/2", r"\boxed{.50}", r"$\dfrac12$", "#### 0.5", "50%", r"$x = \frac{2}{4}$"],
        ["1,234", "1234", r"$1{,}234$", "1234.00", r"\boxed{1234}"],
        [r"$\sqrt{2}/2$", r"$\frac{1}{\sqrt{2}}$", "0.7071068"],
        ["0", "-0.0", r"\boxed{0}"],
        [r"$10^{30}$", "1" + "0" * 30],
        [r"\boxed{(x+1)^2}", r"$x^2+2x+1$"],
        [r"\boxed{1,2}", r"\boxed{\{2, 1\}}", r"$\{1.0, 2\}$"],
        [r"\boxed{[0, \frac12]}", r"$[0, 0.5]$"],
    ],
)
def test_equal_answers_are_counted_together(ways: list[str]) -> None:
    answers = {MathReward()(make_sample(way, "7")).answer for way in ways}
    assert len(answers) == 1
    assert None not in answers


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "2"), ("0.000000001", "0.000000002"), ("1" + "0" * 30, "1" + "0" * 29 + "1"), ("$x$", "$y$")],
)
def test_different_answers_are_not_counted_together(one: str, other: str) -> None:
    reward = MathReward()
    assert reward(make_sample(one, "7")).answer != reward(make_sample(other, "7")).answer


def test_exact_match_ignores_white_space_at_the_ends_and_case_when_told() -> None:
    exact = ExactMatchReward(ExactMatchOptions())
    assert exact(make_sample(" Paris\n", "Paris ")) == RewardResult(1.0, "Paris")
    assert exact(make_sample("paris", "Paris")) == RewardResult(0.0, "paris")
    assert exact(make_sample("Par is", "Paris")).value == 0.0
    assert exact(make_sample("42", 42)).value == 1.0
    loose = ExactMatchReward(ExactMatchOptions(ignore_case=True))
    assert loose(make_sample("PARIS ", "Paris")) == RewardResult(1.0, "paris")
    assert loose(make_sample("London", "Paris")).value == 0.0


@pytest.mark.parametrize("expected", [None, "", True, ["a"]])
def test_exact_match_fails_without_an_expected_answer(expected: Json) -> None:
    with pytest.raises(ValueError, match="expected answer"):
        ExactMatchReward(ExactMatchOptions())(make_sample("", expected))


def test_format_must_match_the_whole_response_across_lines() -> None:
    reward = FormatReward(FormatOptions(pattern=r"<think>.*</think>.+"))
    assert reward(make_sample("\n<think>a\nb</think>\n7 ")) == RewardResult(1.0, None)
    assert reward(make_sample("well, <think>a</think>7")).value == 0.0
    assert reward(make_sample("<think>a</think>")).value == 0.0
    assert FormatReward(FormatOptions(pattern=r"\d+"))(make_sample("12 apples")).value == 0.0
