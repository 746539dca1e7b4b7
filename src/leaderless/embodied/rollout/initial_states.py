"""The first observations of episodes of a group, which have to be the same."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leaderless.config import RecipeError
from leaderless.environments.protocol import Task

PIXEL_NOISE = 16
"""Largest difference of a pixel, from 0 to 255, that may come from how an image is drawn on a GPU."""
STATE_NOISE = 1e-3
"""Largest difference of a number of the state that may come from how it is computed, as a share of it if above 1."""


@dataclass
class _First:
    """First observation of the first episode of a group, until all others have begun."""

    frame: NDArray[np.uint8]
    state: NDArray[np.float32]
    instruction: str
    num_missing: int


class Starts:
    """Compares the first observation of each episode with the first episode's of its group, as they begin."""

    def __init__(self, episodes: Sequence[tuple[Task, int]], *, is_exact: bool) -> None:
        """Expect episodes.

        Args:
            episodes: Row of the dataset and seed of each; those with the same row and seed are a group.
            is_exact: Whether a group begins in the same state; of others, as real robots, only the instruction counts.
        """
        self._sizes = Counter((id(task), seed) for task, seed in episodes)
        self._is_exact = is_exact
        self._firsts: dict[tuple[int, int], _First] = {}

    def compare(
        self, task: Task, seed: int, frame: NDArray[np.uint8], state: NDArray[np.float32], instruction: str
    ) -> None:
        """Take what an episode shows at first.

        Args:
            task: Row of the dataset.
            seed: Seed of the environment.
            frame: Pixels of all cameras.
            state: State.
            instruction: Instruction.

        Raises:
            RecipeError: It is not what another one of its group has shown.
        """
        key = id(task), seed
        if self._sizes[key] < 2:
            return
        first = self._firsts.get(key)
        if first is None:
            self._firsts[key] = _First(frame, state, instruction, self._sizes[key] - 1)
            return
        if difference := self._difference(first, frame, state, instruction):
            raise RecipeError.at(
                "body.type",
                f"episodes of a group do not begin alike: with the task {json.dumps(task, default=str)[:200]} and the "
                f"seed {seed}, {difference}. They are compared with one another, so reset() has to draw everything "
                "from its task and seed alone (`python -m leaderless.embodied.simulators.conformance TYPE` checks it); "
                "where it cannot, set batch.responses_per_prompt to 1",
            )
        first.num_missing -= 1
        if not first.num_missing:
            del self._firsts[key]

    def _difference(self, first: _First, frame: NDArray[np.uint8], state: NDArray[np.float32], instruction: str) -> str:
        """Difference in words; empty where there is none."""
        if instruction != first.instruction:
            return f"the instruction is {first.instruction!r} in one and {instruction!r} in another"
        if not self._is_exact:
            return ""
        allowed = STATE_NOISE * np.maximum(1.0, np.abs(first.state))
        if (is_off := np.abs(state - first.state) > allowed).any():
            number = int(is_off.argmax())
            return f"number {number} of the state is {first.state[number]:g} in one and {state[number]:g} in another"
        far = np.maximum(frame, first.frame) - np.minimum(frame, first.frame)
        if far.size and int(far.max()) > PIXEL_NOISE:
            return f"{float((far > PIXEL_NOISE).mean()):.1%} of the pixels' numbers differ by more than {PIXEL_NOISE}"
        return ""
