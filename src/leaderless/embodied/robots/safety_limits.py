"""Limits that hold for every movement of an arm: a box, speeds and accelerations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
"""One number for each axis of an arm."""


@dataclass(frozen=True)
class Axis:
    """One direction in which an arm moves, such as the x of its tip or the angle of a joint.

    Attributes:
        name: Name, as it is shown.
        low: Lower end of the box, in the axis's unit (such as m or rad).
        high: Upper end of the box.
        max_speed: Largest speed, in units/s. The action 1 asks for it, -1 for the opposite direction.
        max_acceleration: Largest change of the speed, in units/s².
        max_error: Distance between where the arm should be and where it is measured at which it is stopped, in units.
    """

    name: str
    low: float
    high: float
    max_speed: float
    max_acceleration: float
    max_error: float

    def __post_init__(self) -> None:
        if not (isfinite(self.low) and isfinite(self.high) and self.low < self.high):
            raise ValueError(f"axis '{self.name}': low={self.low:g}, high={self.high:g}: low must be below high")
        for name in ("max_speed", "max_acceleration", "max_error"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"axis '{self.name}': {name}={value:g} must be a finite number above 0")


class Limiter:
    """Turns what is asked for into targets that never leave the box, and never exceed a speed or an acceleration.

    A target moves by `velocity * period_s` in each period. The velocity changes by at most A = `max_acceleration *
    period_s`. Whoever brakes has the velocities v, v - A, v - 2A, ... one after the other. The velocity is at most that
    from which the arm still stops within the box, so all three limits always hold together.
    """

    def __init__(self, axes: Sequence[Axis], period_s: float) -> None:
        self._period_s = period_s
        self.low, self.high = (np.array([getattr(axis, name) for axis in axes]) for name in ("low", "high"))
        self._max_speed = np.array([axis.max_speed for axis in axes])
        self._max_change = np.array([axis.max_acceleration for axis in axes]) * period_s
        self.target = (self.low + self.high) / 2
        self.velocity = np.zeros(len(axes))

    def start_at(self, position: Vector) -> None:
        """Begin at rest, where the arm is; the position must be in the box."""
        assert ((position >= self.low) & (position <= self.high)).all()
        self.target, self.velocity = position.copy(), np.zeros_like(position)

    @property
    def is_at_rest(self) -> bool:
        """Whether the target stands still."""
        return not self.velocity.any()

    def advance(self, wish: Vector) -> bool:
        """Move the target by one period.

        Args:
            wish: Velocity that is asked for, as a share of the largest speed, from -1 to 1.

        Returns:
            Whether the wish had to be changed.
        """
        wanted = np.clip(wish, -1.0, 1.0) * self._max_speed
        lowest = np.maximum(self.velocity - self._max_change, -self._fastest(self.target - self.low))
        highest = np.minimum(self.velocity + self._max_change, self._fastest(self.high - self.target))
        before = self.target
        self.velocity = np.clip(wanted, lowest, highest)
        self.target = np.clip(before + self.velocity * self._period_s, self.low, self.high)
        return bool((np.abs(self.velocity - wanted) > 1e-9 * self._max_speed).any())

    def advance_towards(self, position: Vector) -> bool:
        """Move the target by one period towards a position in the box; returns whether it is there, at rest."""
        gap = position - self.target
        # Whoever comes from another direction brakes first; `advance` sees to that.
        wanted = np.sign(gap) * np.minimum(self._fastest(np.abs(gap)), self._max_speed)
        self.advance(wanted / self._max_speed)
        is_near = np.abs(position - self.target) <= 1e-9 * (self.high - self.low)
        self.target = np.where(is_near, position, self.target)  # what rounding has left
        return self.is_at_rest and bool((self.target == position).all())

    def _fastest(self, room: Vector) -> Vector:
        """The largest velocity that still stops within a distance.

        With v = kA the distance is period_s * A k(k + 1) / 2, and it is linear in v in between.
        """
        rest = np.maximum(room, 0.0) / self._period_s
        change = self._max_change
        num_steps = np.floor((np.sqrt(1.0 + 8.0 * rest / change) - 1.0) / 2.0)
        fastest: Vector = (rest + change * num_steps * (num_steps + 1) / 2.0) / (num_steps + 1)
        return fastest
