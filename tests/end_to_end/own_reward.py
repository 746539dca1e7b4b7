"""A reward such as a user would write; it imports no torch, as the processes that compute rewards start faster then."""

from __future__ import annotations

from leaderless import RewardInput


def own_reward(sample: RewardInput) -> float:
    """A number between 0 and 1 that differs from response to response."""
    return sum(map(ord, sample.response)) % 7 / 6
