"""A driver of Franka's arms by panda-py. It was written against the documentation, and has never moved a real arm."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from math import pi
from types import ModuleType
from typing import Protocol, cast

import numpy as np

from leaderless.robots.arm import Arm, ArmSpec, Image, Near, Reading, Station
from leaderless.robots.limits import Axis, Vector

GRIPPER_M = 0.08
"""Width of the open gripper."""
GRIPPER_SPEED = 0.1
"""Speed of the gripper's fingers, in m/s."""
GRIPPER_STEP_M = 0.005
"""Change of the wanted width that is sent to the gripper."""


class _Controller(Protocol):
    def set_control(self, position: Vector, orientation: Vector) -> None: ...


class FrankaArm(Arm):
    """The tip of an arm by x, y, z and yaw, with the fingers if wanted; the hand always points as at the reference.

    Its state is the position of each axis, its velocity, and the forces and torques at the tip (6 numbers). Derive from
    it, and override `images`, for cameras.

    Args:
        host: Name or address of the arm's control unit.
        reference: Position x, y, z of the tip around which the box is, in m.
        box: Distance from the reference that x, y and z may have, in m.
        max_yaw: Angle from the reference that the yaw may have, in rad.
        speed: Largest speed of x, y and z, in m/s.
        has_gripper: Whether the width of the fingers is a fifth axis.
        period_s: Time between two commands.
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
        has_gripper: bool = False,
        period_s: float = 0.1,
        cameras: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        if len(reference) != 3 or len(box) != 3:
            raise ValueError(f"reference={list(reference)} and box={list(box)} must have 3 numbers, for x, y and z")
        axes = [
            Axis(name, center - half, center + half, speed, 10.0 * speed, max_error=0.05)
            for name, center, half in zip("xyz", reference, box, strict=True)
        ]
        axes.append(Axis("yaw", -max_yaw, max_yaw, 0.5, 5.0, max_error=0.3))
        if has_gripper:
            # An object between the fingers keeps them from their target, which is no error.
            axes.append(Axis("gripper", 0.0, GRIPPER_M, GRIPPER_SPEED, 10.0 * GRIPPER_SPEED, max_error=1.0))
        self.spec = ArmSpec("franka", tuple(axes), period_s, 2 * len(axes) + 6, cameras or {})
        library = _panda_py()
        self._library = library
        self._panda = library.Panda(host)
        self._orientation = np.asarray(self._panda.get_orientation(), np.float64)  # x, y, z, w
        self._controller: _Controller | None = None
        self._fingers = _Fingers(library.libfranka.Gripper(host)) if has_gripper else None
        self._reference = np.array([*reference, 0.0, *([GRIPPER_M] if has_gripper else [])])
        self._before: Vector | None = None

    def read(self) -> Reading:
        """See `Arm`."""
        if self._controller is not None:
            self._panda.raise_error()
        state = self._panda.get_state()
        widths = [self._fingers.width] if self._fingers is not None else []
        orientation = np.asarray(self._panda.get_orientation(), np.float64)
        position = np.array([*self._panda.get_position(), _yaw(self._orientation, orientation), *widths])
        before = position if self._before is None else self._before
        self._before = position
        velocity = (position - before) / self.spec.period_s
        seen = np.concatenate([position, velocity, state.O_F_ext_hat_K]).astype(np.float32)
        return Reading(position, seen, self.images())

    def images(self) -> Mapping[str, Image]:
        """Newest picture of each camera of `cameras`."""
        return {}

    def move(self, target: Vector) -> None:
        """See `Arm`."""
        assert self._controller is not None
        self._controller.set_control(target[:3], _turned(self._orientation, float(target[3])))
        if self._fingers is not None:
            self._fingers.want(float(target[4]))

    def stop(self) -> None:
        """See `Arm`."""
        self._panda.get_robot().stop()

    def release(self) -> None:
        """See `Arm`."""
        self._panda.recover()
        controller = self._library.controllers.CartesianImpedance(filter_coeff=1.0)
        controller.set_control(self._panda.get_position(), self._panda.get_orientation())
        self._panda.start_controller(controller)
        self._controller = controller

    def prepare(self, seed: int) -> Vector:
        """See `Arm`. The start is drawn from the half of the box around the reference, with open fingers."""
        low, high = (np.array([getattr(axis, name) for axis in self.spec.axes]) for name in ("low", "high"))
        center = (low + high) / 2
        start = center + np.random.default_rng(seed).uniform(-0.25, 0.25, len(center)) * (high - low)
        start[4:] = self._reference[4:]
        found: Vector = start
        return found

    def close(self) -> None:
        """See `Arm`."""
        self._panda.stop_controller()
        if self._fingers is not None:
            self._fingers.close()


class _Fingers:
    """Moves the fingers in a thread of its own, since their calls wait for the end of the movement."""

    def __init__(self, gripper: object) -> None:
        self._gripper = cast("_Gripper", gripper)
        self.width = float(self._gripper.read_once().width)
        self._wanted = self._sent = self.width
        self._changed, self._is_closed = threading.Condition(), False
        threading.Thread(target=self._run, name="fingers", daemon=True).start()

    def want(self, width: float) -> None:
        """Ask for a width, in m."""
        with self._changed:
            self._wanted = width
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or abs(self._wanted - self._sent) > GRIPPER_STEP_M)
                if self._is_closed:
                    return
                self._sent = self._wanted
            self._gripper.move(self._sent, GRIPPER_SPEED)
            self.width = float(self._gripper.read_once().width)


class _Gripper(Protocol):
    def move(self, width: float, speed: float) -> bool: ...

    def read_once(self) -> _GripperState: ...


class _GripperState(Protocol):
    width: float


def _panda_py() -> ModuleType:
    try:
        importlib.import_module("panda_py.controllers")
        importlib.import_module("panda_py.libfranka")
        return importlib.import_module("panda_py")
    except ImportError as error:
        remedy = "pip install panda-python, in the version that fits the arm's firmware"
        raise ValueError(f"the robot 'franka' needs the package panda_py ({error}): {remedy}") from error


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
        max_steps: See `Station`.
        success_steps: See `Station`.
        instruction: See `Station`.
        options: Arguments of `FrankaArm`.
    """
    arm = FrankaArm(**options)  # type: ignore[arg-type]
    if len(goal) != len(arm.spec.axes) or len(tolerance) != len(arm.spec.axes):
        raise ValueError(f"goal and tolerance must have {len(arm.spec.axes)} numbers, one for each axis")
    judge = Near(np.array(goal, np.float64), np.array(tolerance, np.float64))
    return Station(arm, judge, None, max_steps, success_steps=success_steps, instruction=instruction)
