"""Rewards as a user might write them; they import no torch, so that the reward processes start faster."""

from __future__ import annotations

import time

from leaderless import RewardInput, RewardResult


def own_reward(sample: RewardInput) -> float:
    """A number between 0 and 1 that differs from response to response."""
    return sum(map(ord, sample.response)) % 7 / 6


def share_of_digits(sample: RewardInput) -> RewardResult:
    digits = sum(character.isdigit() for character in sample.response)
    return RewardResult(digits / max(1, len(sample.response)), answer=sample.response.strip())


def fail_on_small_letters(sample: RewardInput) -> float:
    if any(character in "abcdefghijklm" for character in sample.response):
        raise LookupError(f"cannot grade {sample.response!r}")
    return share_of_digits(sample).value


def points_of(said: str) -> int:
    """The verdict of a judge that says anything, from 0 to 8; there is none in some texts."""
    points = sum(map(ord, said)) % 13
    if points > 8:
        raise ValueError("it has no opinion")
    return points


def broken(sample: RewardInput) -> float:
    raise LookupError("no such server")


def asleep(sample: RewardInput) -> float:
    time.sleep(600)
    return 1.0
