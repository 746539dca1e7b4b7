"""What runs inside a reward process. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from leaderless.config.rewards import RewardsConfig
from leaderless.observability.secrets import without_secrets
from leaderless.rewards.protocol import RewardInput, RewardResult
from leaderless.rewards.registry import LoadedReward, make_rewards
from leaderless.rewards.spawn import settle_in

CHUNK_S = 0.25
"""Seconds after which a process begins no further response of a chunk and hands back what it has."""
MAX_ERROR_LENGTH = 500
"""Characters of an error's text that are kept."""


@dataclass(frozen=True)
class Outcome:
    """What one reward says of one response.

    Attributes:
        value: Finite; 0 where there is an error.
        answer: The final answer found in the response.
        error: Why there is no value; None where there is.
    """

    value: float = 0.0
    answer: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class LoadFailure:
    """The process could not load the rewards, and says why."""

    reason: str


@dataclass
class _Process:
    """What this process has loaded."""

    rewards: Mapping[str, LoadedReward]
    progress: MutableSequence[int]
    failure: LoadFailure | None


_process = _Process({}, [], None)


def initialize(config: RewardsConfig, progress: MutableSequence[int]) -> None:
    """Load the rewards, once in the life of a process, so that no response pays for it.

    Args:
        config: The recipe's `reward` section.
        progress: Shared with the worker; see `grade_chunk`.
    """
    settle_in()
    _process.progress = progress
    try:
        _process.rewards = make_rewards(config)
    except BaseException as error:  # noqa: BLE001 - this is the process's boundary: the worker raises it
        _process.failure = LoadFailure(describe(error))


def grade_chunk(reward: str, slot: int, samples: Sequence[RewardInput]) -> list[Outcome] | LoadFailure:
    """Grade responses one after another, at least the first of them.

    Args:
        reward: Its name.
        slot: The entry of the shared progress that holds the position of the response being graded, so that the
            worker knows which one it was when it has to end this process.
        samples: The responses.

    Returns:
        The outcomes of the first responses, as many as were begun within `CHUNK_S` seconds.
    """
    if _process.failure is not None:
        return _process.failure
    loaded = _process.rewards[reward]
    end = time.monotonic() + CHUNK_S
    outcomes: list[Outcome] = []
    for position, sample in enumerate(samples):
        if position and time.monotonic() >= end:
            break
        _process.progress[slot] = position
        outcomes.append(_grade(loaded, sample))
    return outcomes


def _grade(reward: LoadedReward, sample: RewardInput) -> Outcome:
    start = time.monotonic()
    try:
        outcome = _checked(reward.grade(sample))
    except BaseException as error:  # noqa: BLE001 - the boundary of the user's code: reported with the sample
        return Outcome(error=describe(error))
    # A chunk leaves its process more time than one response may take; the limit is the same for all of them.
    return outcome if time.monotonic() - start <= reward.timeout_s else timed_out(reward.timeout_s)


def timed_out(timeout_s: float) -> Outcome:
    """The outcome of a response that took too long.

    Args:
        timeout_s: The limit.
    """
    return Outcome(error=f"TimeoutError: took longer than {timeout_s:g} s")


def _checked(result: object) -> Outcome:
    """What a reward returned, as plain values that any process can read."""
    value: object = result
    answer: object = None
    if isinstance(result, RewardResult):
        value, answer = result.value, result.answer
    if not isinstance(value, Real):
        raise TypeError(f"returned a {type(value).__name__}, but must return a number or a RewardResult")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, but must return a finite number")
    if not isinstance(answer, str | None):
        raise TypeError(f"returned an answer that is a {type(answer).__name__}, but it must be text or None")
    return Outcome(number, None if answer is None else _writable(str(answer)))


def describe(error: BaseException) -> str:
    """An error in one short text: its type, message, and where in the code it was raised.

    Args:
        error: As caught.
    """
    try:
        message = str(error)
    except Exception as failure:  # noqa: BLE001 - an error of the user's may fail to describe itself
        message = f"its message cannot be shown ({type(failure).__name__})"
    text = without_secrets(f"{type(error).__name__}: {message}" if message else type(error).__name__)
    if len(text) > MAX_ERROR_LENGTH:
        text = f"{text[:MAX_ERROR_LENGTH]}..."
    return _writable(text + _place(error))


def _place(error: BaseException) -> str:
    """Where a user's code raised an error; the messages of this package need no such help."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    path = Path(frame.tb_frame.f_code.co_filename) if frame is not None else None
    return f" ({path.name}:{frame.tb_lineno})" if frame and path and path.parent != Path(__file__).parent else ""


def _writable(text: str) -> str:
    """Text that UTF-8 can hold, for it goes into files."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
