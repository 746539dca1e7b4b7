"""Several episodes of simulators that hold one each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.embodied.simulators.protocol import Continuous, Floats, Observations, Spaces, Steps, VectorEnvironment
from leaderless.embodied.simulators.saved_states import pack, unpack
from leaderless.environments.protocol import Task


@dataclass(frozen=True)
class SingleObservation:
    """Observation of one episode.

    Attributes:
        images: [height, width, 3] uint8 of each camera.
        state: [state_size] float32.
        instruction: Task in words.
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: Floats
    instruction: str = ""


@dataclass(frozen=True)
class StepOutcome:
    """Result of one action in one episode.

    Attributes:
        seen: Observation after it.
        reward: Its reward.
        is_terminated: Whether the task has come to its end.
        is_truncated: Whether the simulator has cut the episode although the task continues; `Singles` counts steps.
        is_success: Whether the task is done now.
        info: Further facts.
    """

    seen: SingleObservation
    reward: float
    is_terminated: bool
    is_truncated: bool
    is_success: bool
    info: Mapping[str, Json] = field(default_factory=dict)


class Single(ABC):
    """A simulator that holds one episode.

    Attributes:
        spaces: Its observations and actions.
    """

    spaces: Spaces

    @abstractmethod
    def reset(self, task: Task, seed: int) -> SingleObservation:
        """Begin an episode, the same one for the same task and seed."""

    @abstractmethod
    def step(self, action: NDArray[np.generic]) -> StepOutcome:
        """Take one action, [dim] float32 or a number of a choice."""

    def save(self) -> bytes | None:
        """Its whole state; None if it has to be reached again by the same actions."""
        return None

    def restore(self, state: bytes) -> SingleObservation:
        """Continue from a saved state."""
        raise NotImplementedError

    def expert(self) -> NDArray[np.generic]:
        """The next action of an expert."""
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""


@dataclass
class _Past:
    """How an episode has come to where it is."""

    task: Task
    seed: int
    actions: list[NDArray[np.generic]]


class Singles(VectorEnvironment):
    """Episodes of simulators that hold one each, stepped one after the other.

    A simulator that cannot be saved is restored by the same start and the same actions, which needs as much time as the
    episode has taken, and a simulator without randomness of its own.
    """

    def __init__(self, num: int, make: Callable[[], Single]) -> None:
        """Make one simulator for each episode."""
        if num < 1:
            raise ValueError(f"there must be room for at least one episode, not {num}")
        self._singles: list[Single] = []
        self._past: list[_Past | None] = [None] * num
        self._limits: NDArray[np.float32] | None = None
        try:
            self._singles.extend(make() for _ in range(num))
        except BaseException:
            self.close()
            raise
        self.spaces = self._singles[0].spaces
        if isinstance(self.spaces.actions, Continuous):
            self._limits = np.array([self.spaces.actions.low, self.spaces.actions.high], np.float32)

    @override
    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        seen = []
        for one, task, seed in zip(which, tasks, seeds, strict=True):
            self._past[one] = _Past(task, seed, [])
            seen.append(self._singles[one].reset(task, seed))
        return self._observations(seen)

    @override
    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        num, chunk = actions.shape[:2]
        if self._limits is not None:
            actions = np.clip(actions.astype(np.float32), *self._limits)
        rewards, num_steps = np.zeros((num, chunk), np.float32), np.zeros(num, np.int64)
        is_cut, last = np.zeros(num, np.bool_), []
        for row, one in enumerate(which):
            past = self._past_of(one)
            for place, action in enumerate(actions[row]):
                past.actions.append(action.copy())
                outcome = self._singles[one].step(action)
                rewards[row, place] = outcome.reward
                num_steps[row] += 1
                is_cut[row] = outcome.is_truncated or len(past.actions) >= self.spaces.max_steps
                if outcome.is_terminated or is_cut[row]:
                    break
            last.append(outcome)
        terminated = np.array([one.is_terminated for one in last])
        return Steps(
            self._observations([one.seen for one in last]),
            rewards,
            num_steps,
            terminated=terminated,
            truncated=is_cut & ~terminated,
            success=np.array([one.is_success for one in last]),
            infos=tuple(one.info for one in last),
        )

    def _past_of(self, one: int) -> _Past:
        past = self._past[one]
        if past is None:
            raise ValueError(f"episode {one} has not begun: reset it first")
        return past

    @override
    def save(self, which: Sequence[int]) -> list[bytes]:
        saved = []
        for one in which:
            past = self._past_of(one)
            saved.append(pack({**vars(past), "state": self._singles[one].save()}))
        return saved

    @override
    def restore(self, which: Sequence[int], states: Sequence[bytes]) -> Observations:
        seen = []
        for one, state in zip(which, states, strict=True):
            saved = cast("dict[str, Any]", unpack(state))
            inner = saved.pop("state")
            past = self._past[one] = _Past(**saved)
            if inner is not None:
                seen.append(self._singles[one].restore(inner))
                continue
            now = self._singles[one].reset(past.task, past.seed)
            for action in past.actions:
                now = self._singles[one].step(action).seen
            seen.append(now)
        return self._observations(seen)

    @override
    def expert(self, which: Sequence[int]) -> NDArray[np.generic]:
        return np.stack([self._singles[one].expert() for one in which])

    @override
    def close(self) -> None:
        while self._singles:
            self._singles.pop().close()

    def _observations(self, seen: Sequence[SingleObservation]) -> Observations:
        images = {name: np.stack([one.images[name] for one in seen]) for name in self.spaces.images}
        return Observations(images, np.stack([one.state for one in seen]), tuple(one.instruction for one in seen))
