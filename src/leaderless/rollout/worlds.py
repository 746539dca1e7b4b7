"""The environments of a rank: in the rank itself, or in processes next to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from leaderless.config.body import BodyConfig
from leaderless.environments.bodies.protocol import Observations, Spaces, Steps, VectorEnvironment
from leaderless.environments.bodies.registry import open_body
from leaderless.environments.protocol import Task

Failures = Mapping[int, str]
"""Why episodes cannot go on, by the number of their environment."""


class Worlds(Protocol):
    """Environments, by number, each with one episode at a time."""

    def halves(self) -> Sequence[Sequence[int]]:
        """The numbers of environments that step together: some step while the others' actions are computed."""

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """Begin episodes in some environments; observations are in their order, those of failures without meaning."""

    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        """Let some environments step."""

    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        """Wait for them; what has happened is in their order."""

    def close(self) -> None:
        """Close all of them."""


class OwnWorlds:
    """See `Worlds`. Environments in this process: what one raises ends the episodes that step together."""

    def __init__(self, environment: VectorEnvironment, num: int) -> None:
        """Take an environment with room for `num` episodes."""
        self._environment, self._num = environment, num
        self._actions: dict[tuple[int, ...], NDArray[np.generic]] = {}

    def halves(self) -> Sequence[Sequence[int]]:
        """See `Worlds`. Nothing overlaps in one process."""
        return [range(self._num)]

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """See `Worlds`."""
        try:
            return {}, self._environment.reset(slots, tasks, seeds)
        except Exception as error:  # noqa: BLE001 - whatever it raises fails its episodes, and is reported
            return dict.fromkeys(slots, _reason(error)), _nothing()

    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        """See `Worlds`."""
        self._actions[tuple(slots)] = actions

    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        """See `Worlds`."""
        actions = self._actions.pop(tuple(slots))
        try:
            steps = self._environment.step(slots, actions)
            infos = zip(slots, steps.infos, strict=False)  # an environment may give none
            return {slot: str(info["failed"]) for slot, info in infos if "failed" in info}, steps
        except Exception as error:  # noqa: BLE001 - as above
            return dict.fromkeys(slots, _reason(error)), _no_steps()

    def close(self) -> None:
        """See `Worlds`."""
        self._environment.close()


@cache
def _spaces(text: str) -> Spaces:
    environment = open_body(BodyConfig.model_validate_json(text), 1)
    try:
        return environment.spaces
    finally:
        environment.close()


def spaces_of(config: BodyConfig) -> Spaces:
    """What the environment of a recipe shows and takes; errors as of `open_body`."""
    return _spaces(config.model_dump_json())


def open_worlds(config: BodyConfig) -> Worlds:
    """Open the environments of a rank; errors as of `open_body`."""
    return OwnWorlds(open_body(config, config.num_environments), config.num_environments)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> Observations:
    return Observations({}, np.zeros((0, 0), np.float32), ())


def _no_steps() -> Steps:
    none = np.zeros(0, np.bool_)
    return Steps(_nothing(), np.zeros((0, 0), np.float32), np.zeros(0, np.int64), none, none, none)
