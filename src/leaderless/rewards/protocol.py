"""What a reward is given and what it gives back. Imports no torch: rewards run in small processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from leaderless.config import Json


@dataclass(frozen=True)
class RewardInput:
    """A response to grade.

    Attributes:
        prompt: The dataset's prompt column: text or chat messages.
        response: The text that the policy answered, without special tokens.
        answer: The dataset's answer column; None when the recipe names none.
        row: The row of the dataset, all of its columns.
        is_truncated: The response was cut at its longest allowed length.
    """

    prompt: Json
    response: str
    answer: Json
    row: Mapping[str, Json]
    is_truncated: bool


@dataclass(frozen=True)
class RewardResult:
    """What a response is worth, and what it answered.

    Attributes:
        value: Finite.
        answer: The final answer as found in the response, in a form that equal answers share; the majority vote of
            evaluation counts these.
    """

    value: float
    answer: str | None = None


class Reward(Protocol):
    """A function that grades one response; a plain number is a result without an answer."""

    def __call__(self, sample: RewardInput, /) -> float | RewardResult:
        """Grade a response. Raising an error makes the sample count as failed, never as 0."""
