"""Input and result of a reward. Imports no torch, because rewards run in small processes of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import NamedTuple, Protocol

from leaderless.base.values import Json
from leaderless.observability.hidden_values import without_secrets


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
            episode of several samples it is the response of the last.
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


MAX_ERROR_LENGTH = 500
"""Characters of an error's text that are kept."""


class GradingOutcome(NamedTuple):
    """The outcome of one reward for one response, as plain JSON values.

    Attributes:
        value: Finite number; 0 where there is an error.
        answer: Final answer found in the response.
        error: Reason why there is no value; None where there is one.
        seconds: Seconds that it took; 0 where the process that graded it has ended.
    """

    value: float = 0.0
    answer: str | None = None
    error: str | None = None
    seconds: float = 0.0


def grade(
    reward: Reward,
    sample: RewardInput,
    timeout_s: float = math.inf,
    caught: tuple[type[BaseException], ...] = (BaseException,),
) -> GradingOutcome:
    """Grade a response. If that takes too long, it has failed, even if it has a value."""
    begin = time.monotonic()
    try:
        outcome = compute(reward, sample)
    except caught as error:
        outcome = GradingOutcome(error=describe(error))
    else:
        outcome = outcome if time.monotonic() - begin <= timeout_s else timed_out(timeout_s)
    return outcome._replace(seconds=round(time.monotonic() - begin, 6))


def compute(reward: Reward, sample: RewardInput) -> GradingOutcome:
    """Call a reward; besides what it raises, a TypeError or ValueError if it does not return a finite number."""
    result: object = reward(sample)
    value, answer = (result.value, result.answer) if isinstance(result, RewardResult) else (result, None)
    if not isinstance(value, Real):
        raise TypeError(f"returned a {type(value).__name__}, but must return a number or a RewardResult")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, but must return a finite number")
    if answer is None:
        return GradingOutcome(number)
    if not isinstance(answer, str):
        raise TypeError(f"returned an answer that is a {type(answer).__name__}, but it must be text or None")
    return GradingOutcome(number, _writable(str(answer)))


def timed_out(timeout_s: float) -> GradingOutcome:
    """The outcome of a response that took longer than the limit."""
    return GradingOutcome(error=f"TimeoutError: took longer than {timeout_s:g} s")


def describe(error: BaseException) -> str:
    """An error in one short text: its type, message, and where in the code it was raised."""
    try:
        message = str(error)
    except Exception as failure:  # noqa: BLE001 - a user's error may fail to describe itself
        message = f"its message cannot be shown ({type(failure).__name__})"
    text = without_secrets(f"{type(error).__name__}: {message}" if message else type(error).__name__)
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[:MAX_ERROR_LENGTH]}..."
    return _writable(text + _place(error))


def _place(error: BaseException) -> str:
    """The line of a user's code that raised an error; messages of this package need no such help."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    path = Path(frame.tb_frame.f_code.co_filename) if frame is not None else None
    return f" ({path.name}:{frame.tb_lineno})" if frame and path and path.parent != Path(__file__).parent else ""


def _writable(text: str) -> str:
    """Text that UTF-8 can encode, as it is written to files."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
