"""Input and result of a reward. Imports no torch, because rewards run in small processes of their own."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

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


class BatchReward(Protocol):
    """A function that grades many responses in one call, declared with `@batch_reward`."""

    def __call__(self, samples: Sequence[RewardInput], /) -> Sequence[float | RewardResult | None]:
        """Grade responses, in their order; None fails one of them. An error fails all."""


AnyReward = Reward | BatchReward
Function = TypeVar("Function", bound=Callable[..., object])
_BATCH_MARK = "__leaderless_batch_reward__"


def batch_reward(function: Function) -> Function:
    """Declare a reward that takes all responses that a worker grades at a time, and returns a list of values.

    Args:
        function: Function or class that follows `BatchReward`.
    """
    setattr(function, _BATCH_MARK, True)
    return function


def takes_batch(reward: AnyReward) -> bool:
    """Whether a reward was declared with `@batch_reward`."""
    return hasattr(reward, _BATCH_MARK)


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
    reward: AnyReward,
    samples: Sequence[RewardInput],
    timeout_s: float = math.inf,
    caught: tuple[type[BaseException], ...] = (BaseException,),
) -> list[GradingOutcome]:
    """Grade responses in one call. If it takes too long, they have failed, even if they have values."""
    begin = time.monotonic()
    try:
        outcomes = compute(reward, samples)
    except caught as error:
        outcomes = [GradingOutcome(error=describe(error))] * len(samples)
    else:
        if time.monotonic() - begin > timeout_s:
            outcomes = [GradingOutcome(error=timed_out(timeout_s, len(samples)))] * len(samples)
    seconds = round((time.monotonic() - begin) / len(samples), 6)
    return [one._replace(seconds=seconds) for one in outcomes]


def compute(reward: AnyReward, samples: Sequence[RewardInput]) -> list[GradingOutcome]:
    """Call a reward with one response, or a batch reward with any number.

    Raises:
        TypeError: It returns no number or, for a batch, no list with an entry for each response.
        ValueError: It returns a number that is not finite.
    """
    if not hasattr(reward, _BATCH_MARK):
        (sample,) = samples
        return [_outcome(reward(sample))]  # type: ignore[arg-type]
    results: object = reward(samples)  # type: ignore[arg-type]
    if not isinstance(results, Sequence) or isinstance(results, str) or len(results) != len(samples):
        size = f" of {len(results)}" if isinstance(results, Sequence) else ""
        raise TypeError(
            f"returned a {type(results).__name__}{size} for {len(samples)} responses, but must return a list with a "
            "number, a RewardResult or None for each"
        )
    return [_outcome_in_batch(result) for result in results]


def _outcome_in_batch(result: object) -> GradingOutcome:
    if result is None:
        return GradingOutcome(error="ValueError: returned None for this response")
    try:
        return _outcome(result)
    except (TypeError, ValueError, OverflowError) as error:
        return GradingOutcome(error=describe(error))


def _outcome(result: object) -> GradingOutcome:
    value, answer = (result.value, result.answer) if isinstance(result, RewardResult) else (result, None)
    if not isinstance(value, Real):
        remedy = "; declare it with @batch_reward if it grades many responses at once" * isinstance(value, list)
        raise TypeError(f"returned a {type(value).__name__}, but must return a number or a RewardResult{remedy}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}, but must return a finite number")
    if answer is None:
        return GradingOutcome(number)
    if not isinstance(answer, str):
        raise TypeError(f"returned an answer that is a {type(answer).__name__}, but it must be text or None")
    return GradingOutcome(number, _writable(str(answer)))


def timed_out(timeout_s: float, num_samples: int = 1) -> str:
    """The error of responses, graded in one call, that took longer than the limit."""
    together = f" for {num_samples} responses at once; raise its timeout_s" if num_samples > 1 else ""
    return f"TimeoutError: took longer than {timeout_s:g} s{together}"


class Failures:
    """Failures of rewards in a row. A reward that only fails is given up for the rest of a call of its pool.

    Args:
        most: Failures in a row, in a call without a success, after which a reward is given up; None for no limit. Those
            of earlier calls count as well if it has never succeeded, but it gets one response in each.
        say: Function that tells the user of the first failure of a reward, and that it is given up.

    Attributes:
        is_stopping: Function that says whether the run was asked to stop: then one failure is enough for a reward that
            has never succeeded.
    """

    def __init__(self, most: int | None = None, say: Callable[[str], None] = lambda _: None) -> None:
        self._most, self._say = most, say
        self.is_stopping: Callable[[], bool] = lambda: False
        self._in_row: Counter[str] = Counter()
        self._last: dict[str, str] = {}
        self._good: set[str] = set()
        """Rewards that have succeeded, in any call."""
        self._over: dict[str, str] = {}
        """Rewards that are given up in this call, each with the error of what is left."""

    def begin(self) -> None:
        """Begin a call."""
        self._over.clear()
        for name, count in self._in_row.items():
            self._in_row[name] = 0 if name in self._good else min(count, (self._most or 1) - 1)

    def add(self, name: str, outcomes: Sequence[GradingOutcome]) -> None:
        """Count the outcomes of a reward for some responses."""
        for outcome in outcomes:
            if outcome.error is None:
                self._good.add(name)
                self._in_row[name] = -sys.maxsize
                continue
            if name not in self._last:
                self._say(f"reward {name} failed: {outcome.error}")
            self._last[name] = outcome.error
            self._in_row[name] += 1

    def hopeless(self, name: str) -> str | None:
        """The error of what a reward has not graded yet, if it is given up."""
        count = self._in_row[name]
        is_stopping = count > 0 and name not in self._good and self.is_stopping()
        if name not in self._over and (is_stopping or (self._most is not None and count >= self._most)):
            times = "" if count == 1 else f" {count} times in a row"
            self._over[name] = f"RuntimeError: not graded, as {name} has failed{times}: {self._last[name]}"
            self._say(f"reward {name} has failed{times}: it grades no more responses of this step")
        return self._over.get(name)


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
