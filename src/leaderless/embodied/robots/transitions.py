"""Transitions for learners such as RLPD; transitions in which a person acted are demonstrations too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.embodied.simulators.protocol import Observations, Steps


@dataclass(frozen=True)
class Transitions:
    """Transitions of n decisions, each for a chunk of steps.

    Attributes:
        images: Pictures before, uint8 [n, height, width, 3] of each camera.
        state: State before, float32 [n, state_size].
        next_images: Pictures after; where an episode has ended, its last ones.
        next_state: State after.
        actions: Actions that were taken, float32 [n, chunk, dim]: the person's where one intervened; 0 for steps
            that were not executed.
        rewards: Rewards, float32 [n, chunk].
        num_steps: Number of steps that were executed, int64 [n].
        terminated: Whether the task has come to its end, bool [n]. Only then is the value after it 0.
        truncated: Whether the episode was cut, bool [n].
        intervened: Steps in which a person acted, bool [n, chunk].
    """

    images: Mapping[str, NDArray[np.uint8]]
    state: NDArray[np.float32]
    next_images: Mapping[str, NDArray[np.uint8]]
    next_state: NDArray[np.float32]
    actions: NDArray[np.float32]
    rewards: NDArray[np.float32]
    num_steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    intervened: NDArray[np.bool_]

    def __len__(self) -> int:
        """Number of transitions."""
        return len(self.num_steps)

    def take(self, rows: NDArray[np.generic]) -> Transitions:
        """Some of the transitions.

        Args:
            rows: Mask, bool [n], or numbers of rows.
        """

        def of(value: object) -> object:
            if isinstance(value, Mapping):
                return {name: array[rows] for name, array in value.items()}
            return cast("NDArray[np.generic]", value)[rows]

        return Transitions(**{one.name: of(getattr(self, one.name)) for one in fields(self)})  # type: ignore[arg-type]

    def demonstrations(self) -> Transitions:
        """Those in which a person acted."""
        return self.take(np.asarray(self.intervened.any(axis=1)))


def transitions_of(before: Observations, actions: NDArray[np.float32], steps: Steps) -> Transitions:
    """The transitions of one `VectorEnvironment.step`; failed episodes are left out.

    Args:
        before: Observations before the step.
        actions: Actions of the policy, [n, chunk, dim].
        steps: Results from the environment. If its infos have `actions` and `intervened`, as in
            `RobotEnvironment`, these are the executed actions, which may differ from the policy's.
    """
    taken = np.array(actions, np.float32)
    intervened = np.zeros(taken.shape[:2], bool)
    infos: Sequence[Mapping[str, Json]] = steps.infos or ({},) * len(taken)
    for row, info in enumerate(infos):
        num = int(steps.num_steps[row])
        if info.get("actions"):
            taken[row, :num] = np.array(info["actions"], np.float32)
            intervened[row, :num] = np.array(info["intervened"], bool)
        taken[row, num:] = 0.0
    found = Transitions(
        images=before.images,
        state=before.state,
        next_images=steps.observations.images,
        next_state=steps.observations.state,
        actions=taken,
        rewards=steps.rewards,
        num_steps=steps.num_steps,
        terminated=steps.terminated,
        truncated=steps.truncated,
        intervened=intervened,
    )
    return found.take(np.array(["failed" not in info for info in infos]))


class TransitionSink(Protocol):
    """Receiver of transitions, such as a replay buffer."""

    def append(self, transitions: Transitions) -> None:
        """Keep transitions."""


class TransitionRecorder:
    """Puts all transitions into one memory, and those in which a person acted also into the memory of demonstrations.

    Args:
        online: Memory of all transitions.
        demonstrations: Memory of transitions in which a person acted.
    """

    def __init__(self, online: TransitionSink, demonstrations: TransitionSink) -> None:
        self._online, self._demonstrations = online, demonstrations

    def record(self, before: Observations, actions: NDArray[np.float32], steps: Steps) -> Transitions:
        """Record one `VectorEnvironment.step`, and return its transitions."""
        transitions = transitions_of(before, actions, steps)
        for memory, found in ((self._online, transitions), (self._demonstrations, transitions.demonstrations())):
            if len(found):
                memory.append(found)
        return transitions
