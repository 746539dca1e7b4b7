"""The `format` reward: the response has the form asked for. Imports no torch."""

from __future__ import annotations

import re

from leaderless.config.rewards import FormatOptions
from leaderless.rewards.protocol import RewardInput, RewardResult


class FormatReward:
    """1 where the whole response matches a pattern, else 0.

    Args:
        options: The pattern.
    """

    def __init__(self, options: FormatOptions) -> None:
        self._pattern = re.compile(options.pattern, re.DOTALL)

    def __call__(self, sample: RewardInput, /) -> RewardResult:
        """Grade a response; white space at its ends does not count, and it has no answer.

        Args:
            sample: The response.
        """
        return RewardResult(float(self._pattern.fullmatch(sample.response.strip()) is not None))
