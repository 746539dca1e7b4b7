"""One reward grades one response, whatever it does; in reward processes and without them. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import NamedTuple, Protocol

from leaderless.config.rewards import RewardsConfig
from leaderless.observability.secrets import without_secrets
from leaderless.rewards.protocol import RewardInput, RewardResult
from leaderless.rewards.registry import LoadedReward, make_rewards

MAX_ERROR_LENGTH = 500
"""Characters of an error's text that are kept."""


class Outcome(NamedTuple):
    """What one reward found one response to be worth.

    Attributes:
        value: Finite number; 0 where there is an error.
        answer: Final answer found in the response.
        error: Reason why there is no value; None where there is one.
    """

    value: float = 0.0
    answer: str | None = None
    error: str | None = None


Outcomes = Mapping[tuple[str, int], Outcome]
"""Outcomes by reward and index of the response."""


class Graders(Protocol):
    """What grades many responses."""

    def start(self) -> None:
        """Load the rewards, or begin to."""

    def stop(self) -> None:
        """Stop grading, whatever rewards are doing."""

    def run(self, samples: Sequence[RewardInput], work: Mapping[str, Sequence[int]]) -> Outcomes:
        """Grade responses.

        Args:
            samples: All responses.
            work: Indices of the responses that each reward grades, by reward.

        Raises:
            RuntimeError: The rewards cannot be loaded or computed.
        """


class InProcess:
    """Grades in the worker's own process, where a debugger can stop inside a reward.

    Time limits are not enforced, and a reward that crashes or prints does so in the worker.

    Args:
        config: The recipe's `reward` section.
        on_news: Function to call after each response.
    """

    def __init__(self, config: RewardsConfig, on_news: Callable[[], None]) -> None:
        self._config = config
        self._on_news = on_news
        self._rewards: Mapping[str, LoadedReward] = {}

    def start(self) -> None:
        """Load the rewards."""
        if not self._rewards:
            self._rewards = make_rewards(self._config, in_worker=True)

    def stop(self) -> None:
        """There is nothing to stop."""

    def run(self, samples: Sequence[RewardInput], work: Mapping[str, Sequence[int]]) -> Outcomes:
        """Grade responses one after another; see `Graders.run`."""
        self.start()
        return {(name, index): self._grade(name, samples[index]) for name in work for index in work[name]}

    def _grade(self, name: str, sample: RewardInput) -> Outcome:
        try:
            return compute(self._rewards[name], sample)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary of the user's code: kept with the sample
            return Outcome(error=describe(error))
        finally:
            self._on_news()


def grade_in_turn(reward: LoadedReward, samples: Iterable[RewardInput]) -> Iterable[Outcome]:
    """Grade responses one after another, inside a reward process.

    Args:
        reward: What grades them.
        samples: The responses.

    Yields:
        One outcome for each response. One that took too long has failed, though it may have a value.
    """
    for sample in samples:
        start = time.monotonic()
        try:
            outcome = compute(reward, sample)
        except BaseException as error:  # noqa: BLE001 - the boundary of the user's code: kept with the sample
            outcome = Outcome(error=describe(error))
        else:
            if time.monotonic() - start > reward.timeout_s:
                outcome = timed_out(reward.timeout_s)
        yield outcome


def compute(reward: LoadedReward, sample: RewardInput) -> Outcome:
    """Call a reward and check what it returns.

    Args:
        reward: The reward.
        sample: The response.

    Returns:
        Plain values that any process can read.

    Raises:
        Exception: Any that the reward raises, and a TypeError or ValueError if it does not return a finite number.
    """
    result: object = reward.grade(sample)
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


def timed_out(timeout_s: float) -> Outcome:
    """The outcome of a response that took too long.

    Args:
        timeout_s: The limit.
    """
    return Outcome(error=f"TimeoutError: took longer than {timeout_s:g} s")


def describe(error: BaseException) -> str:
    """An error in one short text: its type, message, and where in the code it was raised.

    Args:
        error: The error as caught.
    """
    try:
        message = str(error)
    except Exception as failure:  # noqa: BLE001 - a user's error may fail to describe itself
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
