"""A reward as a user might write it; it imports no torch, so that the reward processes start faster."""

from __future__ import annotations

from leaderless import RewardInput


def own_reward(sample: RewardInput) -> float:
    """A number between 0 and 1 that differs from response to response."""
    return sum(map(ord, sample.response)) % 7 / 6
