"""The environments of a rank, in itself or in processes next to it, and whether episodes of a group begin alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.env_processes import EnvironmentLost, EnvironmentProcess, ProcessAnswer
from leaderless.embodied.simulators.protocol import (
    NotAsDeclared,
    Observations,
    Spaces,
    Steps,
    VectorEnvironment,
    check_seen,
    check_steps,
    not_finite,
)
from leaderless.embodied.simulators.registry import open_body
from leaderless.environments.protocol import Task

Failures = Mapping[int, str]
"""Why episodes cannot go on, by the number of their environment."""
PIXEL_NOISE = 16
"""Largest difference of a pixel, from 0 to 255, that may come from how an image is drawn on a GPU."""
STATE_NOISE = 1e-3
"""Largest difference of a number of the state that may come from how it is computed, as a share of it if above 1."""
_NOTHING = Observations({}, np.zeros((0, 0), np.float32), ())
_NONE = np.zeros(0, np.bool_)
_NO_STEPS = Steps(_NOTHING, _NOTHING.state, np.zeros(0, np.int64), _NONE, _NONE, _NONE)


class LocalVectorEnvs:
    """Environments in this process, by number, each with one episode at a time.

    An exception in one ends the episodes that step together.

    Attributes:
        repeats_starts: Whether the same task and seed lead to the same start, as in all but real robots.
        num_processes: Number of processes next to this one in which they are.
    """

    num_processes = 0

    def __init__(self, environment: VectorEnvironment, num: int) -> None:
        """Take an environment with room for `num` episodes."""
        self._environment, self._num, self.repeats_starts = environment, num, environment.repeats_starts
        self._actions: dict[tuple[int, ...], NDArray[np.generic]] = {}

    def halves(self) -> Sequence[Sequence[int]]:
        """One half with all of them: nothing overlaps in one process."""
        return [range(self._num)]

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """Begin episodes in some environments; observations are in their order, and mean nothing for failures.

        Raises:
            RecipeError: What they show is not as declared.
        """
        try:
            seen = self._environment.reset(slots, tasks, seeds)
            check_seen(self._environment.spaces, seen, len(slots))
            return not_finite(slots, seen), seen
        except NotAsDeclared as error:
            raise RecipeError.at("body.type", str(error)) from error
        except Exception as error:  # noqa: BLE001 - whatever it raises fails its episodes, and is reported
            return dict.fromkeys(slots, f"{type(error).__name__}: {error}"), _NOTHING

    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        """Let some environments step."""
        self._actions[tuple(slots)] = actions

    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        """Wait for them; what has happened is in their order. Errors as of `reset`."""
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
            return dict.fromkeys(slots, f"{type(error).__name__}: {error}"), _NO_STEPS

    def close(self) -> None:
        """Close all of them."""
        self._environment.close()


class ProcessVectorEnvs:
    """Environments in processes next to this one, likewise; where one is lost, its episodes fail."""

    def __init__(self, config: BodyConfig, chunk: int) -> None:
        """Divide episodes among processes, which start when they are needed."""
        num, count = config.num_environments, min(config.processes, config.num_environments)
        self._shares = [range(num * k // count, num * (k + 1) // count) for k in range(count)]
        self._spaces, self.repeats_starts = _opened(config.model_dump_json())
        self._chunk, self.num_processes = chunk, count
        self._processes = [EnvironmentProcess(config, self._spaces, len(share), chunk) for share in self._shares]

    def halves(self) -> Sequence[Sequence[int]]:
        """Two halves, each with a part of every process."""
        first = [slot for share in self._shares for slot in share[: -(-len(share) // 2)]]
        second = [slot for share in self._shares for slot in share[-(-len(share) // 2) :]]
        return [first, second] if second else [first]

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """Begin episodes in some environments, all of them before any is waited for."""
        given = {slot: (task, seed) for slot, task, seed in zip(slots, tasks, seeds, strict=True)}
        for process, share in zip(self._processes, self._shares, strict=True):
            if mine := [slot for slot in slots if slot in share]:
                some, chances = zip(*(given[slot] for slot in mine), strict=True)
                process.begin_reset([slot - share.start for slot in mine], some, chances)

        failures, found = self._each(slots, EnvironmentProcess.finish_reset)
        seen = self._blank(slots, found)
        for rows, answer in found:
            answer.numbers.read_seen(answer.which, seen, rows)
        return {**not_finite(slots, seen), **failures}, seen

    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        """Let some environments step."""
        place = {slot: row for row, slot in enumerate(slots)}
        for process, share in zip(self._processes, self._shares, strict=True):
            if mine := [slot for slot in slots if slot in share]:
                process.begin_step([slot - share.start for slot in mine], actions[[place[slot] for slot in mine]])

    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        """Wait for them."""
        failures, found = self._each(slots, EnvironmentProcess.finish_step)
        num, infos = len(slots), list[Mapping[str, Json]]([{}] * len(slots))
        rewards, num_steps = np.zeros((num, self._chunk), np.float32), np.zeros(num, np.int64)
        terminated, truncated, success = np.zeros((3, num), np.bool_)
        steps = Steps(self._blank(slots, found), rewards, num_steps, terminated, truncated, success, infos)
        for rows, answer in found:
            answer.numbers.read_done(answer.which, steps, rows)
            for row, info in zip(rows, answer.infos, strict=False):  # an environment may give none
                infos[row] = info
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

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


VectorEnvs = LocalVectorEnvs | ProcessVectorEnvs


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
        """Expect episodes by their row of the dataset and seed; those with the same are a group.

        Groups begin in the same state if it `is_exact`; of others, as real robots, only the instruction counts.
        """
        self._sizes = Counter((id(task), seed) for task, seed in episodes)
        self._is_exact = is_exact
        self._firsts: dict[tuple[int, int], _First] = {}

    def compare(
        self, task: Task, seed: int, frame: NDArray[np.uint8], state: NDArray[np.float32], instruction: str
    ) -> None:
        """Take what an episode shows at first: the pixels of all cameras, state and instruction.

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
