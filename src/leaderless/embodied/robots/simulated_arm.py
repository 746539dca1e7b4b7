"""A simulated arm with the faults of real ones: lag, noise, lost pictures, a judge that errs, a person who helps."""

from __future__ import annotations

from collections import deque
from math import exp

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.embodied.robots.arm import Arm, ArmSpec, HumanOperator, Image, Reading, Station, SuccessJudge
from leaderless.embodied.robots.safety_limits import Axis, Vector

NAMES = "xyzw"
CAMERA = "front"
HALF_WIDTH = 0.5
"""The box is a square or cube of 1 m, around 0."""


class DummyArm(Arm):
    """A point that follows its targets with a lag, and a goal to reach.

    Its state is position, velocity and goal, each with one number per axis.

    Args:
        num_axes: Number of axes, 1 to 4.
        period_s: Time between two commands.
        max_speed: Largest speed of each axis, in m/s.
        max_acceleration: Largest change of the speed of each axis, in m/s².
        lag_s: Time in which the distance to a target shrinks to 37 %.
        noise: Standard deviation of the measured positions, in m.
        latency_steps: Number of periods by which readings are late.
        dropped: Share of pictures that get lost; the one before is seen again.
        camera_size: Height and width of the picture, in pixels; 0 for no camera. It shows the first two axes.
        is_simulated: Whether time passes only while there are commands; else the arm moves in real time.
    """

    def __init__(  # noqa: PLR0913 - what is wrong with an arm
        self,
        *,
        num_axes: int = 2,
        period_s: float = 0.05,
        max_speed: float = 1.0,
        max_acceleration: float = 10.0,
        lag_s: float = 0.02,
        noise: float = 0.002,
        latency_steps: int = 0,
        dropped: float = 0.0,
        camera_size: int = 0,
        is_simulated: bool = True,
    ) -> None:
        if not 1 <= num_axes <= len(NAMES):
            raise ValueError(f"num_axes={num_axes} must be from 1 to {len(NAMES)}")
        if not 0.0 <= dropped < 1.0 or lag_s < 0 or noise < 0 or latency_steps < 0:
            faults = f"dropped={dropped:g}, lag_s={lag_s:g}, noise={noise:g}, latency_steps={latency_steps}"
            raise ValueError(f"{faults}: dropped must be from 0 to below 1, the others at least 0")
        axes = tuple(
            Axis(name, -HALF_WIDTH, HALF_WIDTH, max_speed, max_acceleration, max_error=0.5) for name in NAMES[:num_axes]
        )
        cameras = {CAMERA: (camera_size, camera_size)} if camera_size else {}
        self.spec = ArmSpec("dummy", axes, period_s, 3 * num_axes, cameras, is_simulated)
        self._follows = 1.0 - exp(-period_s / lag_s) if lag_s else 1.0
        self._noise, self._dropped = noise, dropped
        self._rng = np.random.default_rng(0)
        self.position, self.goal = np.zeros(num_axes), np.zeros(num_axes)
        self._velocity, self._next_goal, self._start = np.zeros(num_axes), np.zeros(num_axes), np.zeros(num_axes)
        self._next_seed = 0
        self._late: deque[tuple[Vector, Vector]] = deque(maxlen=latency_steps + 1)
        self._image: Image | None = None
        self._reading = self._measure()

    @override
    def read(self) -> Reading:
        """Return what the sensors measured once after the last movement."""
        return self._reading

    @override
    def move(self, target: Vector) -> None:
        before = self.position
        self.position = before + self._follows * (target - before)
        self._velocity = (self.position - before) / self.spec.period_s
        self._reading = self._measure()

    @override
    def stop(self) -> None:
        self._velocity = np.zeros_like(self._velocity)

    @override
    def release(self) -> None:
        """Do nothing: a simulated arm holds nothing."""

    @override
    def prepare(self, seed: int) -> Vector:
        """Draw goal and start from the inner 80 % of the box, at least 0.25 m apart."""
        rng = np.random.default_rng(seed)
        reach, num = 0.8 * HALF_WIDTH, len(self.position)
        goal, start = rng.uniform(-reach, reach, (2, num))
        while np.linalg.norm(goal - start) < 0.5 * HALF_WIDTH:
            start = rng.uniform(-reach, reach, num)
        self._next_goal, self._start, self._next_seed = goal, start, seed
        found: Vector = start
        return found

    @override
    def begin(self) -> None:
        """Remove what is left of the lag, so that a seed always gives the same start."""
        self.goal, self.position = self._next_goal, self._start.copy()
        self._velocity = np.zeros_like(self.position)
        self._rng = np.random.default_rng([self._next_seed, 1])
        self._late.clear()
        self._image = None
        self._reading = self._measure()

    def _measure(self) -> Reading:
        measured = np.clip(self._rng.normal(self.position, self._noise), -HALF_WIDTH, HALF_WIDTH)
        self._late.append((measured, self._velocity))
        position, velocity = self._late[0]
        state = np.concatenate([position, velocity, self.goal]).astype(np.float32)
        if CAMERA not in self.spec.cameras:
            return Reading(position, state)
        is_fresh = self._image is None or self._rng.random() >= self._dropped
        if self._image is None or is_fresh:
            self._image = _picture(self.spec.cameras[CAMERA][0], position, self.goal)
        return Reading(position, state, {CAMERA: self._image}, is_fresh)


def _picture(size: int, position: Vector, goal: Vector) -> Image:
    """A dark table with a red goal and the white tip of the arm."""
    image = np.full((size, size, 3), 40, np.uint8)
    places = (np.arange(size) + 0.5) / size - HALF_WIDTH
    for center, color, radius in ((goal, (220, 40, 40), 0.08), (position, (240, 240, 240), 0.05)):
        x, y = center[0], center[1] if len(center) > 1 else 0.0
        image[(places[:, None] - y) ** 2 + (places[None, :] - x) ** 2 <= radius**2] = color
    return image


class Classifier(SuccessJudge):
    """A judge that errs: it sees success near the goal, and sometimes elsewhere.

    Args:
        arm: Arm that is judged.
        radius: Distance to the goal at which the task is done, in m.
        false_positives: Share of other readings that it takes for success.
    """

    def __init__(self, arm: DummyArm, radius: float, false_positives: float) -> None:
        if radius <= 0 or not 0.0 <= false_positives < 1.0:
            shown = f"radius={radius:g}, false_positives={false_positives:g}"
            raise ValueError(f"{shown}: radius must be above 0, false_positives from 0 to below 1")
        self._arm, self._radius, self._false_positives = arm, radius, false_positives
        self._rng = np.random.default_rng(0)

    @override
    def begin(self) -> None:
        self._rng = np.random.default_rng(np.abs(self._arm.goal * 1e9).astype(np.int64))

    @override
    def is_done(self, reading: Reading) -> bool:
        errs = bool(self._rng.random() < self._false_positives)
        return errs or bool(np.linalg.norm(reading.position - self._arm.goal) <= self._radius)

    def facts(self) -> dict[str, float]:
        """The true distance to the goal."""
        return {"distance": float(np.linalg.norm(self._arm.position - self._arm.goal))}


class ScriptedHuman(HumanOperator):
    """A person who takes over when the arm is far from the goal for long, and lets go again.

    Args:
        arm: Arm that is watched.
        far: Distance to the goal above which the person worries, in m.
        patience_steps: Number of steps in a row far from the goal after which the person takes over.
        help_steps: Number of steps for which the person acts.
    """

    def __init__(self, arm: DummyArm, *, far: float, patience_steps: int, help_steps: int) -> None:
        if far <= 0 or patience_steps < 1 or help_steps < 1:
            shown = f"far={far:g}, patience_steps={patience_steps}, help_steps={help_steps}"
            raise ValueError(f"{shown}: far must be above 0, the others at least 1")
        self._arm, self._far = arm, far
        self._patience_steps, self._help_steps = patience_steps, help_steps
        self._num_far = self._num_left = 0

    @override
    def begin(self) -> None:
        self._num_far = self._num_left = 0

    @override
    def intervene(self, reading: Reading, action: Vector) -> Vector | None:
        way = self._arm.goal - reading.position
        self._num_far = self._num_far + 1 if np.linalg.norm(way) > self._far else 0
        if not self._num_left and self._num_far > self._patience_steps:
            self._num_left, self._num_far = self._help_steps, 0
        if not self._num_left:
            return None
        self._num_left -= 1
        return steer(way, self._arm.spec)


def steer(way: Vector, spec: ArmSpec) -> NDArray[np.float64]:
    """The action of an expert, who goes straight along `way` and brakes at its end."""
    speeds = np.array([axis.max_speed for axis in spec.axes])
    wish = way / (speeds * 3.0 * spec.period_s)
    return np.asarray(wish / max(1.0, float(np.abs(wish).max())))


def expert_actions(state: NDArray[np.float32], spec: ArmSpec) -> NDArray[np.float32]:
    """The actions of an expert on dummies.

    Args:
        state: States of the arms, [n, 3 * axes].
        spec: The arm.
    """
    position, _, goal = np.split(state.astype(np.float64), 3, axis=1)
    return np.stack([steer(way, spec) for way in goal - position]).astype(np.float32)


def dummy(
    *,
    radius: float = 0.05,
    false_positives: float = 0.0,
    has_human: bool = False,
    far: float = 0.25,
    patience_steps: int = 8,
    help_steps: int = 5,
    max_steps: int = 50,
    success_steps: int = 1,
    **options: float,
) -> Station:
    """A station with a dummy arm.

    Args:
        radius: Distance to the goal at which the task is done, in m.
        false_positives: Share of other readings that the judge takes for success.
        has_human: Whether a `ScriptedHuman` watches.
        far: Distance to the goal above which the person worries, in m.
        patience_steps: Number of steps in a row far from the goal after which the person takes over.
        help_steps: Number of steps for which the person acts.
        max_steps: Number of steps after which an episode is cut.
        success_steps: Number of steps in a row for which the judge must see success.
        options: Arguments of `DummyArm`.
    """
    arm = DummyArm(**options)  # type: ignore[arg-type]
    human = ScriptedHuman(arm, far=far, patience_steps=patience_steps, help_steps=help_steps) if has_human else None
    judge = Classifier(arm, radius, false_positives)
    return Station(arm, judge, human, max_steps, success_steps=success_steps, instruction="reach the red goal")
