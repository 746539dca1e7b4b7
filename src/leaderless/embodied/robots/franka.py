"""A driver of Franka's arms by franky. It has moved arms in the simulator franky-sim alone, never a real one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import pi
from types import ModuleType
from typing import Protocol

import numpy as np
from typing_extensions import override

from leaderless.embodied.robots.arm import Arm, ArmSpec, Image, Near, Reading, Station
from leaderless.embodied.robots.safety_limits import Axis, Vector


class FrankaArm(Arm):
    """The tip of an arm by x, y, z and yaw. The hand keeps the direction in which it points at the start of the server.

    Its state is the position of each axis, its velocity, and the forces and torques at the tip (6 numbers). Derive from
    it, and override `images`, for cameras. The fingers stay as they are.

    Args:
        host: Name or address of the arm's control unit.
        reference: Position x, y, z of the tip around which the box is, in m.
        box: Distance from the reference that x, y and z may have, in m.
        max_yaw: Angle from the reference that the yaw may have, in rad.
        speed: Largest speed of x, y and z, in m/s.
        period_s: Time between two commands.
        is_realtime: Whether the kernel of this machine has to be a real-time one, which real arms need.
        cameras: Height and width of the pictures of each camera that `images` gives.
    """

    def __init__(
        self,
        *,
        host: str,
        reference: Sequence[float],
        box: Sequence[float] = (0.05, 0.05, 0.05),
        max_yaw: float = 0.5,
        speed: float = 0.1,
        period_s: float = 0.1,
        is_realtime: bool = True,
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        if len(reference) != 3 or len(box) != 3:
            raise ValueError(f"reference={list(reference)} and box={list(box)} must have 3 numbers, for x, y and z")
        axes = [
            Axis(name, center - half, center + half, speed, 10.0 * speed, max_error=0.05)
            for name, center, half in zip("xyz", reference, box, strict=True)
        ]
        axes.append(Axis("yaw", -max_yaw, max_yaw, 0.5, 5.0, max_error=0.3))
        self.spec = ArmSpec("franka", tuple(axes), period_s, 2 * len(axes) + 6, cameras or {})
        self._franky = _franky()
        realtime = self._franky.RealtimeConfig
        self._robot = self._franky.Robot(host, realtime_config=realtime.Enforce if is_realtime else realtime.Ignore)
        self._motion: _Motion | None = None
        self._orientation = np.asarray(self._robot.current_pose.end_effector_pose.quaternion, np.float64)  # x, y, z, w
        self._before: Vector | None = None

    @override
    def read(self) -> Reading:
        if self._motion is not None:
            self._robot.poll_motion()  # raises what has ended the motion
        pose = self._robot.current_pose.end_effector_pose
        position = np.array([*pose.translation, _yaw(self._orientation, np.asarray(pose.quaternion))])
        velocity = (position - (position if self._before is None else self._before)) / self.spec.period_s
        self._before = position
        seen = np.concatenate([position, velocity, self._robot.state.O_F_ext_hat_K]).astype(np.float32)
        return Reading(position, seen, self.images())

    def images(self) -> Mapping[str, Image]:
        """Newest picture of each camera of `cameras`."""
        return {}

    @override
    def move(self, target: Vector) -> None:
        assert self._motion is not None
        self._motion.set_reference(self._reference(target[:3], _turned(self._orientation, float(target[3]))))

    @override
    def stop(self) -> None:
        self._motion = None
        self._robot.stop()

    @override
    def release(self) -> None:
        """Hold the arm where it is, as by a spring."""
        with suppress(self._franky.ControlException):
            self._robot.poll_motion()  # raises once what the stop has ended
        self._robot.recover_from_errors()
        pose = self._robot.current_pose.end_effector_pose
        motion = self._franky.CartesianImpedanceTrackingMotion()
        motion.set_reference(self._reference(np.asarray(pose.translation), np.asarray(pose.quaternion)))
        self._robot.move(motion, asynchronous=True)
        self._motion = motion

    @override
    def prepare(self, seed: int) -> Vector:
        """Draw the start from the half of the box around the reference."""
        low, high = (np.array([getattr(axis, name) for axis in self.spec.axes]) for name in ("low", "high"))
        center = (low + high) / 2
        start = center + np.random.default_rng(seed).uniform(-0.25, 0.25, len(center)) * (high - low)
        found: Vector = start
        return found

    def _reference(self, position: Vector, orientation: Vector) -> object:
        return self._franky.CartesianReference(self._franky.Affine(position, orientation))


class _Motion(Protocol):
    def set_reference(self, reference: object) -> None: ...


def _franky() -> ModuleType:
    try:
        return importlib.import_module("franky")
    except ImportError as error:
        remedy = "pip install franky-control, in the version that fits the arm's firmware"
        raise ValueError(f"the robot 'franka' needs the package franky ({error}): {remedy}") from error


def _yaw(reference: Vector, orientation: Vector) -> float:
    """Angle around the vertical axis by which an orientation is turned against another, from -pi to pi."""
    x, y, z, w = orientation
    a, b, c, d = -reference[0], -reference[1], -reference[2], reference[3]
    turned_z = w * c + z * d + x * b - y * a
    turned_w = w * d - x * a - y * b - z * c
    return float((2.0 * np.arctan2(turned_z, turned_w) + pi) % (2.0 * pi) - pi)


def _turned(orientation: Vector, yaw: float) -> Vector:
    """An orientation x, y, z, w, turned around the vertical axis."""
    x, y, z, w = orientation
    s, c = np.sin(yaw / 2), np.cos(yaw / 2)
    return np.array([c * x - s * y, c * y + s * x, c * z + s * w, c * w - s * z])


def franka(
    *,
    goal: Sequence[float],
    tolerance: Sequence[float],
    max_steps: int = 100,
    success_steps: int = 3,
    instruction: str = "",
    **options: object,
) -> Station:
    """A station with a Franka arm, whose task is done where each axis is near a goal.

    Args:
        goal: Position of each axis at which the task is done.
        tolerance: Distance from it that each axis may have.
        max_steps: Number of steps after which an episode is cut.
        success_steps: Number of steps in a row for which the judge must see success.
        instruction: Instruction for the policy; empty if there is none.
        options: Arguments of `FrankaArm`.
    """
    arm = FrankaArm(**options)  # type: ignore[arg-type]
    if len(goal) != len(arm.spec.axes) or len(tolerance) != len(arm.spec.axes):
        raise ValueError(f"goal and tolerance must have {len(arm.spec.axes)} numbers, one for each axis")
    judge = Near(np.array(goal, np.float64), np.array(tolerance, np.float64))
    return Station(arm, judge, None, max_steps, success_steps=success_steps, instruction=instruction)
