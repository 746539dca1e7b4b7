"""An environment that fails on purpose, to try what a run makes of it. Imports no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.env_processes import is_beside_a_rank
from leaderless.embodied.simulators.protocol import Observations, Steps, VectorEnvironment
from leaderless.embodied.simulators.registry import find_body
from leaderless.environments.protocol import Task

CRASH_CODE = 70
"""Exit code of a process that crashes on purpose."""
STREAM = 0xFA17
"""Number that keeps the draws of faults apart from the environment's."""


class Faulty(VectorEnvironment):
    """Another environment, in which some episodes fail at their first step; which ones follows from their seed."""

    def __init__(
        self,
        num: int,
        type: str = "table",  # noqa: A002 - the word of recipes
        *,
        options: Mapping[str, Json] | None = None,
        crash: float = 0.0,
        hang: float = 0.0,
        error: float = 0.0,
    ) -> None:
        """Make the other environment.

        Args:
            num: Number of episodes.
            type: Name of the environment, as in `body.type`.
            options: Its options.
            crash: Share of episodes that end the process; only with `body.processes`.
            hang: Share of episodes whose step never ends; only with `body.processes`.
            error: Share of episodes that raise an error.
        """
        if min(crash, hang, error) < 0 or crash + hang + error > 1:
            raise ValueError(
                f"crash={crash}, hang={hang}, error={error}: each must be at least 0, and their sum at most 1"
            )
        config = BodyConfig(type=type, options=dict(options or {}))
        self._world = find_body(config)(num, **config.options)
        self.spaces = self._world.spaces
        self._shares = {"crash": crash, "hang": hang, "error": error}
        self._faults: list[str] = [""] * num

    @override
    @property
    def repeats_starts(self) -> bool:
        return self._world.repeats_starts

    @override
    def reset(self, which: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> Observations:
        for one, seed in zip(which, seeds, strict=True):
            self._faults[one] = self.fault_of(seed)
        return self._world.reset(which, tasks, seeds)

    def fault_of(self, seed: int) -> str:
        """Name of the fault of episodes with a seed; empty for most."""
        place, total = np.random.default_rng([seed, STREAM]).random(), 0.0
        for name, share in self._shares.items():
            total += share
            if place < total:
                return name
        return ""

    @override
    def step(self, which: Sequence[int], actions: NDArray[np.generic]) -> Steps:
        for one in which:
            fault, self._faults[one] = self._faults[one], ""
            if fault:
                _fail(fault)
        return self._world.step(which, actions)

    @override
    def save(self, which: Sequence[int]) -> list[bytes]:
        """Save the environment; an episode that was saved before its first step does not fail later."""
        return self._world.save(which)

    @override
    def restore(self, which: Sequence[int], states: Sequence[bytes]) -> Observations:
        for one in which:
            self._faults[one] = ""
        return self._world.restore(which, states)

    @override
    def expert(self, which: Sequence[int]) -> NDArray[np.generic]:
        return self._world.expert(which)

    @override
    def close(self) -> None:
        self._world.close()


def _fail(fault: str) -> None:
    if fault != "error" and not is_beside_a_rank():
        raise RuntimeError(f"a {fault} on purpose would take the whole rank with it: set body.processes")
    if fault == "crash":
        os._exit(CRASH_CODE)
    if fault == "hang":
        threading.Event().wait()
    raise RuntimeError("this episode fails on purpose (body.options.error)")
