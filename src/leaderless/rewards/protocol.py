"""Input and result of a reward. Imports no torch, because rewards run in small processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from leaderless.config import Json


@dataclass(frozen=True)
class Passage:
    """A part of a transcript.

    Attributes:
        text: Text without special tokens.
        is_sampled: Whether the policy sampled it; if not, a tool or an environment wrote it.
    """

    text: str
    is_sampled: bool = True


@dataclass(frozen=True)
class RewardInput:
    """An episode to grade; most consist of one response.

    Attributes:
        prompt: The dataset's prompt column: text or chat messages.
        response: Text that the policy sampled, and nothing that tools or an environment wrote, without special tokens.
        answer: The dataset's answer column; None if the recipe names none.
        row: Row of the dataset with all of its columns.
        is_truncated: Whether the response was cut at the longest allowed length.
        transcript: Everything after the prompt, in order, by whoever wrote it; by default the response alone. Of an
            episode of several samples it is that of the last.
        group: Number that the responses to the same prompt share; None where it is not known.
    """

    prompt: Json
    response: str
    answer: Json
    row: Mapping[str, Json]
    is_truncated: bool
    transcript: tuple[Passage, ...] = ()
    group: int | None = None

    def __post_init__(self) -> None:
        if not self.transcript:
            object.__setattr__(self, "transcript", (Passage(self.response),))


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
