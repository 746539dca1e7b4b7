"""Protocol that users implement, environments that step many episodes at once, and its checks. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.environments.protocol import Task

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Continuous:
    """Actions of real numbers.

    Attributes:
        low: Smallest value of each number.
        high: Largest value of each number.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if (
            len(self.low) != len(self.high)
            or not self.low
            or any(a >= b for a, b in zip(self.low, self.high, strict=True))
        ):
            raise ValueError(f"an action needs a low below a high for each number, not {self.low} and {self.high}")

    @property
    def dim(self) -> int:
        """Numbers of an action."""
        return len(self.low)


@dataclass(frozen=True)
class Discrete:
    """Actions that are one of several choices, numbered from 0."""

    num_choices: int

    def __post_init__(self) -> None:
        if self.num_choices < 2:
            raise ValueError(f"an action needs at least two choices, not {self.num_choices}")


@dataclass(frozen=True)
class Spaces:
    """Observations and actions of an environment.

    Attributes:
        images: Height and width of the images of each camera.
        state_size: Numbers of the state; 0 without one.
        actions: Kind of an action.
        max_steps: Steps after which it truncates an episode.
        has_instructions: Whether episodes have an instruction.
    """

    images: Mapping[str, tuple[int, int]]
    state_size: int
    actions: Continuous | Discrete
    max_steps: int
    has_instructions: bool = False


@dataclass(frozen=True)
class Observations:
    """Observations of n episodes, in the order that was asked for.

    Attributes:
        images: [n, height, width, 3] uint8 of each camera.
        state: [n, state_size] float32.
        instructions: Instruction of each; empty text without one.
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: Floats
    instructions: tuple[str, ...]


@dataclass(frozen=True)
class Steps:
    """Results of a chunk of actions in n episodes, in the order that was asked for.

    A chunk stops at the step at which the episode ends.

    Attributes:
        observations: Observations after the steps; the last one of an episode that has ended.
        rewards: [n, chunk] float32, 0 for steps that were not executed.
        num_steps: [n] int64, steps that were executed, at least one.
        terminated: [n] bool, whether the task has come to its end.
        truncated: [n] bool, whether the episode was cut, as after `max_steps`, although the task goes on.
        success: [n] bool, whether the task was done by the last of these steps.
        infos: Further facts of each. `failed` says why an episode cannot be judged; it is then left out of training.
    """

    observations: Observations
    rewards: Floats
    num_steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    infos: Sequence[Mapping[str, Json]] = field(default=())


class VectorEnvironment(ABC):
    """Room for several episodes, each at its own step. Nothing resets by itself.

    Options of the recipe's `body.options` are further arguments of the constructor.

    Attributes:
        spaces: Its observations and actions.
    """

    spaces: Spaces

    @abstractmethod
    def __init__(self, num: int) -> None:
        """Make room for `num` episodes, numbered from 0."""

    @property
    def repeats_starts(self) -> bool:
        """Whether a task and a seed always begin alike, so that starts of a group are compared: if it can be saved."""
        return type(self).save is not VectorEnvironment.save

    @abstractmethod
    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        """Begin episodes; others stay as they are.

        The same task and seed give the same start, bit for bit: that is how the episodes of a group share one.

        Args:
            which: Numbers of the episodes.
            tasks: Row of the dataset for each.
            seeds: Seed of all randomness of each.
        """

    @abstractmethod
    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        """Execute a chunk of actions in some episodes that have not ended.

        Args:
            which: Numbers of the episodes.
            actions: [n, chunk, dim] float32, or [n, chunk] int64 choices.
        """

    def save(self, which: Sequence[int]) -> list[bytes]:
        """The whole state of some episodes.

        Raises:
            NotImplementedError: It cannot be saved, as with real robots.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot save the state of an episode")

    def restore(self, which: Sequence[int], states: Sequence[bytes]) -> Observations:
        """Continue episodes from saved states; see `save`."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore the state of an episode")

    def expert(self, which: Sequence[int]) -> NDArray[np.generic]:
        """The next action of a scripted expert in some episodes, [n, dim] float32 or [n] int64.

        Raises:
            NotImplementedError: There is none.
        """
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    def close(self) -> None:
        """Release what it holds; it may be called twice."""
        return


REMEDY = (
    "correct the environment, or the `spaces` that it declares; `python -m leaderless.embodied.simulators.conformance "
    "TYPE` checks it"
)


class NotAsDeclared(ValueError):  # noqa: N818 - a plain word for users
    """An environment has shown or done something else than it declares; the text says what and what to do."""


def check_seen(spaces: Spaces, seen: Observations, num: int) -> None:
    """Check what `num` episodes show, without a look at pixels.

    Raises:
        NotAsDeclared: It has other cameras, shapes or types, or no instruction where there has to be one.
    """
    _require(isinstance(seen, Observations), f"observations are {type(seen).__name__}, not Observations")
    _require(set(seen.images) == set(spaces.images), f"cameras {list(seen.images)}, declared {list(spaces.images)}")
    for name, (height, width) in spaces.images.items():
        _require_array(f"camera '{name}'", seen.images[name], (num, height, width, 3), np.uint8)
    _require_array("the state", seen.state, (num, spaces.state_size), np.float32)
    _require(len(seen.instructions) == num, f"{len(seen.instructions)} instructions for {num} episodes")
    has_words = all(map(bool, seen.instructions))
    _require(
        has_words == spaces.has_instructions,
        f"has_instructions={spaces.has_instructions} is not what is shown, such as {seen.instructions[0]!r}",
    )


def check_steps(spaces: Spaces, steps: Steps, num: int, chunk: int) -> None:
    """Check what a chunk of actions has done in `num` episodes; numbers of failed ones mean nothing.

    Raises:
        NotAsDeclared: Shapes or types are others, or a chunk did not stop where the episode ended, and only there.
    """
    _require(isinstance(steps, Steps), f"steps are {type(steps).__name__}, not Steps")
    check_seen(spaces, steps.observations, num)
    _require_array("rewards", steps.rewards, (num, chunk), np.float32)
    for name in ("terminated", "truncated", "success"):
        _require_array(name, getattr(steps, name), (num,), np.bool_)
    counts = steps.num_steps
    _require_array("num_steps", counts, (num,), np.int64)
    _require(len(steps.infos) in {0, num}, f"{len(steps.infos)} infos for {num} episodes")
    is_whole = np.array(["failed" not in info for info in steps.infos], np.bool_) if steps.infos else np.True_
    if (((counts < 1) | (counts > chunk)) & is_whole).any():  # the text takes longer than all else
        _require(False, f"num_steps={counts} of a chunk of {chunk}")
    late = (np.arange(chunk) >= counts[:, None]) & np.reshape(is_whole, (-1, 1))
    _require(not steps.rewards[late].any(), "there are rewards for steps after the end of an episode")
    short = (counts < chunk) & ~(steps.terminated | steps.truncated) & is_whole
    _require(not short.any(), "a chunk stopped although the episode goes on")


def not_finite(slots: Sequence[int], seen: Observations, rewards: Floats | None = None) -> dict[int, str]:
    """Why episodes cannot be judged: a number of the state, or a reward, is NaN or infinite; by their number."""
    found: dict[int, str] = {}
    for what, values in (("state", seen.state), ("reward", rewards)):
        if values is None or bool(np.isfinite(values).all()):
            continue
        for row, place in np.argwhere(~np.isfinite(values)).tolist():
            where = f"number {place} of the state" if what == "state" else f"the reward of step {place}"
            found.setdefault(slots[row], f"{where} is {values[row, place]} in environment {slots[row]}")
    return found


def _require_array(what: str, values: object, shape: tuple[int, ...], kind: type[np.generic]) -> None:
    if isinstance(values, np.ndarray) and values.shape == shape and values.dtype == kind:
        return
    came = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
    raise NotAsDeclared(f"{what} is {came}, not {np.dtype(kind).name} {shape}: {REMEDY}")


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise NotAsDeclared(f"{problem}: {REMEDY}")
