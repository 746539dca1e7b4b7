"""A table with colored blocks seen from above: the arm has to reach the one that is named, and no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.embodied.simulators.protocol import Continuous, Floats, Observations, Spaces, Steps, VectorEnvironment
from leaderless.embodied.simulators.saved_states import pack, unpack
from leaderless.environments.protocol import Task

COLORS = {
    "red": (220, 50, 47),
    "green": (64, 160, 43),
    "blue": (38, 110, 220),
    "yellow": (230, 180, 20),
    "purple": (140, 70, 190),
}
"""Colors of blocks; blocks of an episode differ."""
PAPER, ARM = (236, 232, 224), (20, 20, 20)
REACH = 0.12
"""Distance at which the arm has reached a block; the table is 1 wide."""
BUMP = 0.07
"""Distance at which it bumps into a wrong one."""
STRIDE = 0.08
"""Distance that the arm moves along an axis where an action is 1."""
APART = 0.3
"""Least distance of the blocks from one another, and from the arm at first."""
_SAVED = ("_arms", "_moves", "_blocks", "_colors", "_targets", "_steps")


class TableTask(VectorEnvironment):
    """A step moves the arm. Reaching the right block ends the episode with reward 1, bumping into another with 0.

    Attributes:
        num_axes: Axes of the arm.
    """

    num_axes: int = 2

    def __init__(
        self,
        num: int,
        *,
        size: int = 28,
        num_blocks: int = 3,
        num_colors: int = 3,
        num_layouts: int = 0,
        max_steps: int = 32,
        lag: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        """Make room for episodes.

        Args:
            num: Their number.
            size: Pixels of a side of the image.
            num_blocks: Number of blocks.
            num_colors: Number of colors, of which the blocks have different ones.
            num_layouts: Number of tables, of which the number `task` of the row chooses one, or else the seed. Blocks,
                colors and target belong to the table, the arm's place to the seed. With 0, all follow from the seed.
            max_steps: Steps after which an episode is truncated.
            lag: Share of the movement of the last step that remains, below 1.
            noise: Standard deviation of what is added to movements, in widths of the table.
        """
        if not 1 <= num_blocks <= num_colors <= len(COLORS):
            raise ValueError(
                f"num_blocks={num_blocks}, num_colors={num_colors}: there are up to {len(COLORS)} colors, and no more "
                "blocks than colors"
            )
        if size < 12 or max_steps < 1 or num_layouts < 0 or not 0 <= lag < 1 or noise < 0:
            raise ValueError(
                f"size={size}, max_steps={max_steps}, num_layouts={num_layouts}, lag={lag}, noise={noise}: the size "
                "must be at least 12, there must be a step, lag is at least 0 and below 1, and others at least 0"
            )
        axes = self.num_axes
        self.spaces = Spaces({"top": (size, size)}, axes, Continuous((-1.0,) * axes, (1.0,) * axes), max_steps, True)
        self._size, self._lag, self._noise, self._num_colors = size, lag, noise, num_colors
        self._num_layouts = num_layouts
        self._arms, self._moves = np.zeros((num, axes)), np.zeros((num, axes))
        self._blocks = np.zeros((num, num_blocks, axes))  # 0 along all axes but the first two
        self._colors, self._targets = np.zeros((num, num_blocks), np.int64), np.zeros(num, np.int64)
        self._steps = np.zeros(num, np.int64)
        self._chance = [np.random.Generator(np.random.PCG64(0)) for _ in range(num)]
        self._names, self._shades = list(COLORS), np.array(list(COLORS.values()), np.uint8)

    @override
    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        """Draw everything from the seed, and from the table if there are several."""
        for one, task, seed in zip(which, tasks, seeds, strict=True):
            chance = layout = self._chance[one] = np.random.Generator(np.random.PCG64(seed))
            if self._num_layouts:
                layout = np.random.Generator(np.random.PCG64(_number(task, seed) % self._num_layouts))
            places = _scattered(layout, 1 + self._blocks.shape[1])
            self._arms[one, :2], self._blocks[one, :, :2] = places[0], places[1:]
            self._colors[one] = layout.permutation(self._num_colors)[: self._blocks.shape[1]]
            self._targets[one] = layout.integers(self._blocks.shape[1])
            if self._num_layouts:
                self._arms[one, :2] = _scattered(chance, 1, self._blocks[one, :, :2])[0]
            self._arms[one, 2:] = chance.uniform(APART, 1, self.num_axes - 2)
            self._moves[one], self._steps[one] = 0.0, 0
        return self._seen(which)

    @override
    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        rows, chunk = np.array(which, np.int64), actions.shape[1]
        num_steps, rewards = np.zeros(len(rows), np.int64), np.zeros((len(rows), chunk), np.float32)
        terminated, truncated = np.zeros(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        for place in range(chunk):
            is_on = ~(terminated | truncated)
            if not is_on.any():
                break
            now = rows[is_on]
            self._move(now, np.clip(actions[is_on, place].astype(np.float64), -1, 1))
            # Only the nearest block can be touched.
            distances = np.linalg.norm(self._blocks[now] - self._arms[now][:, None], axis=2)
            distance, is_target = distances.min(1), distances.argmin(1) == self._targets[now]
            is_right, is_wrong = is_target & (distance < REACH), ~is_target & (distance < BUMP)
            num_steps[is_on] += 1
            rewards[is_on, place] = is_right
            terminated[is_on] = is_right | is_wrong
            truncated[is_on] = ~(is_right | is_wrong) & (self._steps[now] >= self.spaces.max_steps)
        return Steps(self._seen(which), rewards, num_steps, terminated, truncated, rewards.max(1) > 0)

    def _move(self, rows: NDArray[np.int64], actions: NDArray[np.float64]) -> None:
        self._moves[rows] = self._lag * self._moves[rows] + (1 - self._lag) * STRIDE * actions
        shift = self._moves[rows]
        if self._noise:
            shift = shift + self._noise * np.stack(
                [self._chance[row].normal(size=self.num_axes) for row in rows.tolist()]
            )
        self._arms[rows] = np.clip(self._arms[rows] + shift, 0, 1)
        self._steps[rows] += 1

    def _seen(self, which: Sequence[int]) -> Observations:
        rows, size = np.array(which, np.int64), self._size
        images = np.empty((len(rows), size, size, 3), np.uint8)
        images[:] = PAPER
        half = max(1, size // 12)
        for number in range(self._blocks.shape[1]):
            self._paint(images, self._blocks[rows, number], half, self._shades[self._colors[rows, number]])
        self._paint(
            images, self._arms[rows], max(1, half - 1), np.broadcast_to(np.array(ARM, np.uint8), (len(rows), 3))
        )
        names = self._colors[rows, self._targets[rows]]
        instructions = tuple(f"reach the {self._names[name]} block" for name in names)
        return Observations({"top": images}, self._arms[rows].astype(np.float32), instructions)

    def _paint(
        self, images: NDArray[np.uint8], places: NDArray[np.float64], half: int, shades: NDArray[np.uint8]
    ) -> None:
        """Paint a square at a place of each image."""
        middle = half + np.round(places * (self._size - 1 - 2 * half)).astype(np.int64)
        offsets = np.arange(-half, half + 1)
        rows = (middle[:, 1, None] + offsets)[:, :, None]
        columns = (middle[:, 0, None] + offsets)[:, None, :]
        images[np.arange(len(images))[:, None, None], rows, columns] = shades[:, None, None]

    @override
    def save(self, which: Sequence[int]) -> list[bytes]:
        return [
            pack(
                {name: getattr(self, name)[one] for name in _SAVED} | {"chance": self._chance[one].bit_generator.state}
            )
            for one in which
        ]

    @override
    def restore(self, which: Sequence[int], states: Sequence[bytes]) -> Observations:
        for one, state in zip(which, states, strict=True):
            saved = cast("dict[str, Any]", unpack(state))
            self._chance[one].bit_generator.state = saved.pop("chance")
            for name, value in saved.items():
                getattr(self, name)[one] = value
        return self._seen(which)

    @override
    def expert(self, which: Sequence[int]) -> Floats:
        """Go straight to the block, around others that are near."""
        rows = np.array(which, np.int64)
        arms = self._arms[rows]
        way = self._blocks[rows, self._targets[rows]] - arms
        length = np.linalg.norm(way, axis=1, keepdims=True)
        force = way / np.maximum(length, 1e-9)
        for number in range(self._blocks.shape[1]):
            off = arms - self._blocks[rows, number]
            distance = np.linalg.norm(off, axis=1, keepdims=True)
            is_other = (self._targets[rows] != number)[:, None] & (distance < 2 * BUMP)
            side = np.zeros_like(off)
            side[:, 0], side[:, 1] = -off[:, 1], off[:, 0]
            side *= np.where((side * force).sum(1, keepdims=True) >= 0, 1.0, -1.0)
            push = (off + side) / np.maximum(distance, 1e-9) * 2.0
            force = force + np.where(is_other, push, 0.0)
        largest = np.linalg.norm(force, axis=1, keepdims=True)
        speed: Floats = (force / np.maximum(largest, 1e-9) * np.minimum(1.0, length / STRIDE)).astype(np.float32)
        return speed


class TableTaskInSpace(TableTask):
    """A table over which the arm also moves up and down, and turns its hand.

    Both are from 0 to 1, and 0 at the blocks, so that the arm has to come down to reach one, and can pass above others.
    The camera looks down and sees neither; the state has them.
    """

    def __init__(
        self,
        num: int,
        *,
        num_axes: int = 3,
        size: int = 28,
        num_blocks: int = 3,
        max_steps: int = 48,
        lag: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        """Make room for episodes; see `TableTask`.

        Args:
            num: Their number.
            num_axes: Axes of the arm: 3 with its height, 4 with the turn of its hand.
            size: Pixels of a side of the image.
            num_blocks: Number of blocks, each of another color.
            max_steps: Steps after which an episode is truncated.
            lag: Share of the movement of the last step that remains, below 1.
            noise: Standard deviation of what is added to movements, in widths of the table.
        """
        if num_axes not in {3, 4}:
            raise ValueError(f"num_axes={num_axes}: must be 3 or 4; `table` has 2")
        self.num_axes = num_axes
        super().__init__(
            num, size=size, num_blocks=num_blocks, num_colors=num_blocks, max_steps=max_steps, lag=lag, noise=noise
        )


def _number(task: Task, seed: int) -> int:
    """The whole number `task` of a row, or the seed."""
    number = task.get("task")
    return number if isinstance(number, int) and not isinstance(number, bool) else seed


def _scattered(
    chance: np.random.Generator, count: int, others: Iterable[NDArray[np.float64]] = ()
) -> NDArray[np.float64]:
    """Places [count, 2] that are apart from one another, and from others."""
    places: list[NDArray[np.float64]] = []
    taken = list(others)
    while len(places) < count:
        place = chance.uniform(0.08, 0.92, 2)
        if all(np.linalg.norm(place - other) >= APART for other in [*taken, *places]):
            places.append(place)
    return np.stack(places)
