"""Custom rewards: functions of one response that return a number, or a number with the answer they extracted."""

from __future__ import annotations

from leaderless import RewardInput, RewardResult


def digits_right(sample: RewardInput) -> RewardResult:
    """Partial credit: the share of digits that are right, counted from the last one.

    Args:
        sample: Response, with the expected answer from the dataset.
    """
    expected, given = str(sample.answer), sample.response.strip()
    right = sum(a == b for a, b in zip(reversed(expected), reversed(given), strict=False))
    return RewardResult(right / max(len(expected), len(given)), answer=given)


def is_short(sample: RewardInput) -> float:
    """1 for at most three characters, else 0; a reward that raises an error counts as failed, never as 0.

    Args:
        sample: The response.
    """
    return float(len(sample.response) <= 3)
