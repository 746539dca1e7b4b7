"""Rewards of one's own: a function of one response that returns a number, or a number and the answer it found."""

from __future__ import annotations

from leaderless import RewardInput, RewardResult


def digits_right(sample: RewardInput) -> RewardResult:
    """Part of the reward for part of the answer: the share of digits that are right, counted from the last one.

    Args:
        sample: The response, and the expected answer as the dataset has it.
    """
    expected, given = str(sample.answer), sample.response.strip()
    right = sum(a == b for a, b in zip(reversed(expected), reversed(given), strict=False))
    return RewardResult(right / max(len(expected), len(given)), answer=given)


def is_short(sample: RewardInput) -> float:
    """1 for at most three characters; what raises an error is counted as failed, and never as 0.

    Args:
        sample: The response.
    """
    return float(len(sample.response) <= 3)
