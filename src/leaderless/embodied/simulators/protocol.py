"""Protocol that users implement: environments that step many episodes of a body at once. Imports no torch."""

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
