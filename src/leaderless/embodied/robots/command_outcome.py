"""Outcome of a command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from leaderless.embodied.robots.arm import Reading
from leaderless.embodied.robots.safety_limits import Vector


class Refused(RuntimeError):  # noqa: N818 - a plain word
    """A server has not done what it was asked for.

    Attributes:
        code: Kind of reason, as a program tells it: `token`, `version`, `taken`, `frame`, `verb`, `order`, `busy`,
            `shape`, `not_finite`, `late`, `no_episode`, `start`, `cut`, `stopped` or `driver`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class CommandOutcome:
    """Result of a reset, with no steps, or of the steps of a command that were executed.

    Attributes:
        reading: Reading after the last step.
        rewards: Reward of each step, float32 [k].
        actions: Action of each step, float32 [k, axes]: the person's where one has intervened, else the one of the
            policy, from -1 to 1.
        executed: Velocity that the limits have left of it, as a share of the largest, float32 [k, axes].
        intervened: Whether a person acted, bool [k].
        clipped: Whether the policy's action was beyond -1 or 1, bool [k].
        limited: Whether box, speed or acceleration have changed the movement, bool [k].
        is_terminated: Whether the task is done, which ends the episode.
        is_truncated: Whether the episode had its last step, without success.
        cut: Reason why fewer steps were executed than asked for, although the episode has not ended; else empty.
        num_idle: Number of periods without a command since the step before.
        time_s: Time at which the reading was taken, on the server's clock, which never goes back.
        facts: Facts that the judge adds.
    """

    reading: Reading
    rewards: NDArray[np.float32]
    actions: NDArray[np.float32]
    executed: NDArray[np.float32]
    intervened: NDArray[np.bool_]
    clipped: NDArray[np.bool_]
    limited: NDArray[np.bool_]
    is_terminated: bool
    is_truncated: bool
    cut: str
    num_idle: int
    time_s: float
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of steps that were executed."""
        return len(self.rewards)


class Record:
    """The steps of a command so far.

    Args:
        actions: Actions that the policy wants, finite, [chunk, axes].
        num_idle: Number of periods without a command before it.
    """

    def __init__(self, actions: NDArray[np.float64], num_idle: int = 0) -> None:
        self.asked, self._num_idle = actions, num_idle
        self._rewards: list[float] = []
        self._actions: list[Vector] = []
        self._executed: list[Vector] = []
        self._marks: list[tuple[bool, bool, bool]] = []

    @property
    def num_begun(self) -> int:
        """Number of steps that have begun."""
        return len(self._actions)

    @property
    def num_steps(self) -> int:
        """Number of steps that have ended."""
        return len(self._rewards)

    def begin(self, action: Vector, executed: Vector, *, intervened: bool, limited: bool) -> None:
        """Note that a step has begun."""
        clipped = bool((np.abs(self.asked[self.num_begun]) > 1.0).any())
        self._actions.append(action)
        self._executed.append(executed)
        self._marks.append((intervened, clipped, limited))

    def end(self, reward: float) -> None:
        """Note the reward of the step that has begun."""
        self._rewards.append(reward)

    def outcome(
        self,
        reading: Reading,
        time_s: float,
        *,
        facts: Mapping[str, float] | None = None,
        is_terminated: bool = False,
        is_truncated: bool = False,
        cut: str = "",
    ) -> CommandOutcome:
        """The outcome; a step that has begun but not ended is not part of it."""
        num, dim = self.num_steps, self.asked.shape[1]
        marks = np.array(self._marks[:num], dtype=bool).reshape(num, 3)
        return CommandOutcome(
            reading,
            np.array(self._rewards, np.float32),
            np.array(self._actions[:num], np.float32).reshape(num, dim),
            np.array(self._executed[:num], np.float32).reshape(num, dim),
            intervened=marks[:, 0],
            clipped=marks[:, 1],
            limited=marks[:, 2],
            is_terminated=is_terminated,
            is_truncated=is_truncated,
            cut=cut,
            num_idle=self._num_idle,
            time_s=time_s,
            facts=facts or {},
        )
