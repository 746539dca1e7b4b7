"""Interface of drivers of arms, and of what stands next to an arm: a person, and a judge of success."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

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
