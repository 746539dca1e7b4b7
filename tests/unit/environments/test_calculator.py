"""A calculator that costs something, and is used by those who have to."""

from __future__ import annotations

from random import Random

import pytest

from leaderless.environments.calculator import Calculator
from leaderless.environments.tools import ToolError


def begun(cost: float = 0.1) -> Calculator:
    calculator = Calculator(cost)
    assert calculator.reset({"question": "12+30", "answer": 42}, Random(0)) == "12+30"
    return calculator


def test_a_right_answer_is_worth_one_and_each_call_costs() -> None:
    assert begun().act(" 42\n").reward == 1.0
    assert begun().act("41").reward == 0.0
    used = begun(cost=0.25)
    assert [used.calculate("12+30"), used.calculate("7")] == ["42", "7"]
    turn = used.act("42")
    assert (turn.reward, turn.done) == (0.5, True)


@pytest.mark.parametrize("expression", ["", "12+", "+1", "1-2", "2*3", "1 + 2", "9" * 19])
def test_anything_but_a_sum_is_refused_with_the_remedy(expression: str) -> None:
    with pytest.raises(ToolError, match="whole numbers with plus signs between them, such as 12"):
        begun().calculate(expression)
