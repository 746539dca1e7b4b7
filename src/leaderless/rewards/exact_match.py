"""The `exact_match` reward: the response is the expected answer, letter by letter. Imports no torch."""

from __future__ import annotations

from leaderless.config.rewards import ExactMatchOptions
from leaderless.rewards.answers import expected_text
from leaderless.rewards.protocol import RewardInput, RewardResult


class ExactMatchReward:
    """1 where the response equals the expected answer, else 0.

    Args:
        options: Whether case counts.
    """

    def __init__(self, options: ExactMatchOptions) -> None:
        self._options = options

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response; its answer is the response without white space at its ends.

        Args:
            sample: The response and the expected answer, text or a number.

        Raises:
            ValueError: There is no expected answer, or it is neither text nor a number.
        """
        expected, response = expected_text(sample.answer), sample.response.strip()
        if self._options.ignore_case:
            expected, response = expected.casefold(), response.casefold()
        return RewardResult(float(response == expected), response)
