"""Rewards that compare texts, and the expected answer, which other rewards use too. Imports no torch."""

from __future__ import annotations

import math
import re

from leaderless.base.values import Json
from leaderless.config.rewards import ExactMatchOptions, FormatOptions
from leaderless.rewards.protocol import RewardInput, RewardResult


class ExactMatchReward:
    """1 where the response equals the expected answer, else 0."""

    def __init__(self, options: ExactMatchOptions) -> None:
        self._options = options

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response; a ValueError if the expected answer is neither text nor a number."""
        expected, response = expected_text(sample.answer), sample.response.strip()
        if self._options.ignore_case:
            expected, response = expected.casefold(), response.casefold()
        return RewardResult(float(response == expected), response)


class FormatReward:
    """1 where the whole response matches a pattern, else 0; white space at its ends does not count."""

    def __init__(self, options: FormatOptions) -> None:
        self._pattern = re.compile(options.pattern, re.DOTALL)

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response."""
        return RewardResult(float(self._pattern.fullmatch(sample.response.strip()) is not None))


def expected_text(answer: Json) -> str:
    """The expected answer as text; a ValueError if it is neither text nor a finite number."""
    if answer is None:
        raise ValueError("the row has no expected answer; `answer` of the dataset must name the column that holds it")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"the expected answer is a {type(answer).__name__}, but must be text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"the expected answer is {answer}, but must be finite")
    text = str(answer).strip()
    if not text:
        raise ValueError("the expected answer is empty; leave out rows without one")
    return text
