"""Interface of drivers of arms, of a person and a judge of success next to an arm, and outcomes of commands."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.named_functions import is_function_name, load_callable
from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.embodied.robots.safety_limits import Axis, Vector

Image = NDArray[np.uint8]
"""A picture, [height, width, 3]."""


@dataclass(frozen=True)
class ArmSpec:
    """An arm, as its server describes it to clients.

    Attributes:
        name: Name, as it is shown.
        axes: Axes, in the order of actions.
        period_s: Time between two commands.
        state_size: Number of values of a state.
        cameras: Height and width of the pictures of each camera, in pixels.
        is_simulated: Whether time passes only while the arm has a command, as fast as the machine computes. Then
            nothing moves between commands. A physical arm moves in real time, and begins stopped until a person
            releases it.
    """

    name: str
    axes: tuple[Axis, ...]
    period_s: float
    state_size: int
    cameras: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    is_simulated: bool = False

    def __post_init__(self) -> None:
        if not self.axes:
            raise ValueError(f"arm '{self.name}' has no axes: declare at least one `Axis`")
        if not 0.001 <= self.period_s <= 1.0:
            raise ValueError(f"arm '{self.name}': period_s={self.period_s:g} must be from 0.001 to 1 s")


@dataclass(frozen=True)
class Reading:
    """Reading of the sensors of an arm.

    Attributes:
        position: Position of each axis, in its unit.
        state: State for the policy, float32 [state_size].
        images: Picture of each camera.
        is_fresh: Whether the pictures are new since the last reading.
    """

    position: Vector
    state: NDArray[np.float32]
    images: Mapping[str, Image] = field(default_factory=dict)
    is_fresh: bool = True


class Arm(ABC):
    """A driver. Its server calls `read` and `move` once in each period, from one thread.

    No method may take as long as a period, except `prepare` and `close`. A server that dies sends nothing more: an arm
    must by itself come to rest when no `move` follows.
    """

    spec: ArmSpec

    @abstractmethod
    def read(self) -> Reading:
        """The newest reading of all sensors."""

    @abstractmethod
    def move(self, target: Vector) -> None:
        """Move towards a position, to be there when the period ends. The server has checked all limits.

        Args:
            target: Position of each axis, in its unit.
        """

    @abstractmethod
    def stop(self) -> None:
        """Stop at once, without regard to limits of acceleration. It may be called from any thread, several times."""

    @abstractmethod
    def release(self) -> None:
        """Be ready to move again, after a stop and a person's permission."""

    @abstractmethod
    def prepare(self, seed: int) -> Vector:
        """Prepare the scene of an episode, and return where the arm begins. The arm holds in the meantime.

        It may take long, for example while a person puts objects back.

        Args:
            seed: Seed of all randomness of the scene.
        """

    def begin(self) -> None:  # noqa: B027 - few arms need it
        """Begin the prepared episode: the arm is at rest where `prepare` has said."""

    def close(self) -> None:  # noqa: B027
        """Release the device."""


class HumanOperator(ABC):
    """A person who may take over, for example with a joystick that is read here."""

    def begin(self) -> None:  # noqa: B027
        """Begin an episode."""

    @abstractmethod
    def intervene(self, reading: Reading, action: Vector) -> Vector | None:
        """The action of the person in this period, from -1 to 1 for each axis; none while the policy acts.

        Args:
            reading: Newest reading.
            action: Action of the policy.
        """


class SuccessJudge(ABC):
    """Decides whether the task is done, such as a classifier of pictures."""

    def begin(self) -> None:  # noqa: B027
        """Begin an episode."""

    @abstractmethod
    def is_done(self, reading: Reading) -> bool:
        """Whether the reading shows success."""

    def facts(self) -> Mapping[str, float]:
        """Further facts about the last reading, for the record."""
        return {}


class Near(SuccessJudge):
    """Says that the task is done while each axis is near a position."""

    def __init__(self, position: Vector, tolerance: Vector) -> None:
        self._position, self._tolerance = position, tolerance

    @override
    def is_done(self, reading: Reading) -> bool:
        return bool((np.abs(reading.position - self._position) <= self._tolerance).all())


@dataclass(frozen=True)
class Station:
    """An arm with all that a server needs to know.

    Attributes:
        arm: Driver of the arm.
        judge: Judge of success.
        human: Person who may take over, if any.
        max_steps: Number of steps after which an episode is cut.
        max_chunk: Largest number of steps in one command.
        success_steps: Number of steps in a row for which the judge must see success.
        instruction: Instruction for the policy; empty if there is none.
    """

    arm: Arm
    judge: SuccessJudge
    human: HumanOperator | None = None
    max_steps: int = 100
    max_chunk: int = 16
    success_steps: int = 1
    instruction: str = ""

    def __post_init__(self) -> None:
        for name in ("max_steps", "max_chunk", "success_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"station of '{self.arm.spec.name}': {name}={getattr(self, name)} must be at least 1")


BUILT_IN: Mapping[str, str] = {
    "dummy": "leaderless.embodied.robots.simulated_arm:dummy",
    "franka": "leaderless.embodied.robots.franka:franka",
}
"""Functions that make stations and come with the package."""


def make_station(name: str, options: Mapping[str, Json]) -> Station:
    """The station that a built-in name, or a function `package.module:function`, makes with some options.

    Raises:
        RecipeError: There is no such station, or it does not take the options.
    """
    known = BUILT_IN.get(name, name)
    if not is_function_name(known):
        hint = nearest(name, BUILT_IN)
        raise RecipeError.at("", f"unknown robot '{name}'{hint}; a custom one is 'package.module:function'")
    make = load_callable(known, "", "function")
    try:
        inspect.signature(make).bind(**options)
        station = make(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError.at("--option", f"robot '{name}': {error}") from error
    if not isinstance(station, Station):
        raise RecipeError.at("", f"robot '{name}' returned {type(station).__name__}: return a `Station`")
    return station


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
    """The steps so far of a command for actions [chunk, axes], which are finite, after periods without a command."""

    def __init__(self, actions: NDArray[np.float64], num_idle: int = 0) -> None:
        self.asked, self._num_idle = actions, num_idle
        self._rewards: list[float] = []
        self._begun: list[tuple[Vector, Vector, bool, bool, bool]] = []

    @property
    def num_begun(self) -> int:
        """Number of steps that have begun."""
        return len(self._begun)

    @property
    def num_steps(self) -> int:
        """Number of steps that have ended."""
        return len(self._rewards)

    def begin(self, action: Vector, executed: Vector, *, intervened: bool, limited: bool) -> None:
        """Note that a step has begun."""
        clipped = bool((np.abs(self.asked[self.num_begun]) > 1.0).any())
        self._begun.append((action, executed, intervened, clipped, limited))

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
        actions, executed, *marks = zip(*self._begun[:num], strict=True) if num else [()] * 5
        intervened, clipped, limited = (np.array(mark, dtype=bool) for mark in marks)
        return CommandOutcome(
            reading,
            np.array(self._rewards, np.float32),
            np.array(actions, np.float32).reshape(num, dim),
            np.array(executed, np.float32).reshape(num, dim),
            intervened=intervened,
            clipped=clipped,
            limited=limited,
            is_terminated=is_terminated,
            is_truncated=is_truncated,
            cut=cut,
            num_idle=self._num_idle,
            time_s=time_s,
            facts=facts or {},
        )
