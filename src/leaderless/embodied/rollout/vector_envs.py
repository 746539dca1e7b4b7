"""The environments of a rank: in the rank itself, or in processes next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.env_checker import NotAsDeclared, check_seen, check_steps, not_finite
from leaderless.embodied.simulators.env_processes import EnvironmentLost, EnvironmentProcess, ProcessAnswer
from leaderless.embodied.simulators.protocol import Observations, Spaces, Steps, VectorEnvironment
from leaderless.embodied.simulators.registry import open_body
from leaderless.environments.protocol import Task

Failures = Mapping[int, str]
"""Why episodes cannot go on, by the number of their environment."""


class VectorEnvs(Protocol):
    """Environments, by number, each with one episode at a time.

    Attributes:
        repeats_starts: Whether the same task and seed lead to the same start, as in all but real robots.
        num_processes: Number of processes next to this one in which they are.
    """

    repeats_starts: bool
    num_processes: int

    def halves(self) -> Sequence[Sequence[int]]:
        """The numbers of environments that step together: some step while the others' actions are computed."""

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """Begin episodes in some environments; observations are in their order, and mean nothing for failures.

        Raises:
            RecipeError: What they show is not as declared.
        """

    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        """Let some environments step."""

    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        """Wait for them; what has happened is in their order.

        Raises:
            RecipeError: What they show or do is not as declared.
        """

    def close(self) -> None:
        """Close all of them."""


class LocalVectorEnvs(VectorEnvs):
    """Environments in this process; an exception in one ends the episodes that step together."""

    num_processes = 0

    def __init__(self, environment: VectorEnvironment, num: int) -> None:
        """Take an environment with room for `num` episodes."""
        self._environment, self._num, self.repeats_starts = environment, num, environment.repeats_starts
        self._actions: dict[tuple[int, ...], NDArray[np.generic]] = {}

    @override
    def halves(self) -> Sequence[Sequence[int]]:
        """One half with all of them: nothing overlaps in one process."""
        return [range(self._num)]

    @override
    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        try:
            seen = self._environment.reset(slots, tasks, seeds)
            check_seen(self._environment.spaces, seen, len(slots))
            return not_finite(slots, seen), seen
        except NotAsDeclared as error:
            raise RecipeError.at("body.type", str(error)) from error
        except Exception as error:  # noqa: BLE001 - whatever it raises fails its episodes, and is reported
            return dict.fromkeys(slots, _reason(error)), _nothing()

    @override
    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        self._actions[tuple(slots)] = actions

    @override
    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        actions = self._actions.pop(tuple(slots))
        try:
            steps = self._environment.step(slots, actions)
            check_steps(self._environment.spaces, steps, len(slots), actions.shape[1])
            infos = zip(slots, steps.infos, strict=False)  # an environment may give none
            told = {slot: str(info["failed"]) for slot, info in infos if "failed" in info}
            return {**not_finite(slots, steps.observations, steps.rewards), **told}, steps
        except NotAsDeclared as error:
            raise RecipeError.at("body.type", str(error)) from error
        except Exception as error:  # noqa: BLE001 - as above
            return dict.fromkeys(slots, _reason(error)), _no_steps()

    @override
    def close(self) -> None:
        self._environment.close()


class ProcessVectorEnvs(VectorEnvs):
    """Environments in processes next to this one; where one is lost, its episodes fail."""

    def __init__(self, config: BodyConfig, chunk: int) -> None:
        """Divide episodes among processes, which start when they are needed."""
        num, count = config.num_environments, min(config.processes, config.num_environments)
        self._shares = [range(num * k // count, num * (k + 1) // count) for k in range(count)]
        self._spaces, self.repeats_starts = _opened(config.model_dump_json())
        self._chunk, self.num_processes = chunk, count
        self._processes = [EnvironmentProcess(config, self._spaces, len(share), chunk) for share in self._shares]

    @override
    def halves(self) -> Sequence[Sequence[int]]:
        """Two halves, each with a part of every process."""
        first = [slot for share in self._shares for slot in share[: -(-len(share) // 2)]]
        second = [slot for share in self._shares for slot in share[-(-len(share) // 2) :]]
        return [first, second] if second else [first]

    @override
    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        given = {slot: (task, seed) for slot, task, seed in zip(slots, tasks, seeds, strict=True)}
        for process, share in zip(self._processes, self._shares, strict=True):  # all begin before any is waited for
            if mine := [slot for slot in slots if slot in share]:
                some, chances = zip(*(given[slot] for slot in mine), strict=True)
                process.begin_reset([slot - share.start for slot in mine], some, chances)

        failures, found = self._each(slots, EnvironmentProcess.finish_reset)
        seen = self._blank(slots, found)
        for rows, answer in found:
            answer.numbers.read_seen(answer.which, seen, rows)
        return {**not_finite(slots, seen), **failures}, seen

    @override
    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        place = {slot: row for row, slot in enumerate(slots)}
        for process, share in zip(self._processes, self._shares, strict=True):
            if mine := [slot for slot in slots if slot in share]:
                process.begin_step([slot - share.start for slot in mine], actions[[place[slot] for slot in mine]])

    @override
    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        failures, found = self._each(slots, EnvironmentProcess.finish_step)
        steps = self._blank_steps(slots, found)
        for rows, answer in found:
            answer.numbers.read_done(answer.which, steps, rows)
        told = {slot: str(info["failed"]) for slot, info in zip(slots, steps.infos, strict=True) if "failed" in info}
        return {**not_finite(slots, steps.observations, steps.rewards), **failures, **told}, steps

    def _each(
        self, slots: Sequence[int], ask: Callable[[EnvironmentProcess, Sequence[int]], ProcessAnswer]
    ) -> tuple[dict[int, str], list[tuple[Sequence[int], ProcessAnswer]]]:
        """Answers of processes about their slots, with the places of these, and why others have failed."""
        failures: dict[int, str] = {}
        found: list[tuple[Sequence[int], ProcessAnswer]] = []
        for process, share in zip(self._processes, self._shares, strict=True):
            rows = [row for row, slot in enumerate(slots) if slot in share]
            if not rows:
                continue
            try:
                found.append((rows, ask(process, [slots[row] - share.start for row in rows])))
            except EnvironmentLost as error:
                failures |= dict.fromkeys((slots[row] for row in rows), str(error))
        return failures, found

    def _blank(self, slots: Sequence[int], found: Sequence[tuple[Sequence[int], ProcessAnswer]]) -> Observations:
        """Observations in the order of slots, with the instructions, and with zeros until others are read."""
        words = [""] * len(slots)
        for rows, answer in found:
            for row, text in zip(rows, answer.instructions, strict=True):
                words[row] = text
        num = len(slots)
        images = {name: np.zeros((num, *size, 3), np.uint8) for name, size in self._spaces.images.items()}
        return Observations(images, np.zeros((num, self._spaces.state_size), np.float32), tuple(words))

    def _blank_steps(self, slots: Sequence[int], found: Sequence[tuple[Sequence[int], ProcessAnswer]]) -> Steps:
        """Steps of slots, likewise, with the further facts."""
        infos: list[Mapping[str, Json]] = [{} for _ in slots]
        for rows, answer in found:
            for row, info in zip(rows, answer.infos, strict=False):  # an environment may give none
                infos[row] = info
        num = len(slots)
        terminated, truncated, success = np.zeros((3, num), np.bool_)
        rewards, num_steps = np.zeros((num, self._chunk), np.float32), np.zeros(num, np.int64)
        seen = self._blank(slots, found)
        return Steps(seen, rewards, num_steps, terminated, truncated, success, tuple(infos))

    @override
    def close(self) -> None:
        for process in self._processes:
            process.close()


@cache
def _opened(text: str) -> tuple[Spaces, bool]:
    """Spaces of an environment, and whether its starts repeat."""
    environment = open_body(BodyConfig.model_validate_json(text), 1)
    try:
        return environment.spaces, environment.repeats_starts
    finally:
        environment.close()


def spaces_of(config: BodyConfig) -> Spaces:
    """Spaces of a recipe's environment; errors as in `open_body`."""
    return _opened(config.model_dump_json())[0]


def open_worlds(config: BodyConfig, chunk: int) -> VectorEnvs:
    """Open the environments of a rank, for decisions of some steps; errors as of `open_body`."""
    if config.processes:
        return ProcessVectorEnvs(config, chunk)
    return LocalVectorEnvs(open_body(config, config.num_environments), config.num_environments)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> Observations:
    return Observations({}, np.zeros((0, 0), np.float32), ())


def _no_steps() -> Steps:
    none = np.zeros(0, np.bool_)
    return Steps(_nothing(), np.zeros((0, 0), np.float32), np.zeros(0, np.int64), none, none, none)
