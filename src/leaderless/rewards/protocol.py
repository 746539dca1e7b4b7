"""Input and result of a reward. Imports no torch, because rewards run in small processes of their own."""

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
        response: Text that the policy answered, without special tokens.
        answer: The dataset's answer column; None if the recipe names none.
        row: Row of the dataset with all of its columns.
        is_truncated: Whether the response was cut at the longest allowed length.
    """

    prompt: Json
    response: str
    answer: Json
    row: Mapping[str, Json]
    is_truncated: bool


@dataclass(frozen=True)
class RewardResult:
    """Value of a response, and the answer in it.

    Attributes:
        value: Finite number.
        answer: Final answer found in the response, in a form that equal answers share; the majority vote of evaluation
            counts these.
    """

    value: float
    answer: str | None = None


class Reward(Protocol):
    """A function that grades one response; a plain number is a result without an answer."""

    def __call__(self, sample: RewardInput, /) -> float | RewardResult:
        """Grade a response. If it raises an error, the sample counts as failed, never as 0."""
