"""The environments of a rank: in the rank itself, or in processes next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from leaderless.config import RecipeError
from leaderless.config.body import BodyConfig
from leaderless.environments.bodies.checked import NotAsDeclared, check_seen, check_steps, not_finite
from leaderless.environments.bodies.processes import EnvironmentLost, EnvironmentProcess
from leaderless.environments.bodies.protocol import Observations, Spaces, Steps, VectorEnvironment
from leaderless.environments.bodies.registry import open_body
from leaderless.environments.protocol import Task

Found = TypeVar("Found")
Number = TypeVar("Number", bound=np.generic)
Failures = Mapping[int, str]
"""Why episodes cannot go on, by the number of their environment."""


class Worlds(Protocol):
    """Environments, by number, each with one episode at a time.

    Attributes:
        repeats_starts: Whether the same task and seed lead to the same start, as in all but real robots.
    """

    repeats_starts: bool

    def halves(self) -> Sequence[Sequence[int]]:
        """The numbers of environments that step together: some step while the others' actions are computed."""

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """Begin episodes in some environments; observations are in their order, those of failures without meaning.

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


class OwnWorlds:
    """See `Worlds`. Environments in this process: what one raises ends the episodes that step together."""

    def __init__(self, environment: VectorEnvironment, num: int) -> None:
        """Take an environment with room for `num` episodes."""
        self._environment, self._num, self.repeats_starts = environment, num, environment.repeats_starts
        self._actions: dict[tuple[int, ...], NDArray[np.generic]] = {}

    def halves(self) -> Sequence[Sequence[int]]:
        """See `Worlds`. Nothing overlaps in one process."""
        return [range(self._num)]

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """See `Worlds`."""
        try:
            seen = self._environment.reset(slots, tasks, seeds)
            check_seen(self._environment.spaces, seen, len(slots))
            return not_finite(slots, seen), seen
        except NotAsDeclared as error:
            raise RecipeError.at("body.type", str(error)) from error
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
            check_steps(self._environment.spaces, steps, len(slots), actions.shape[1])
            infos = zip(slots, steps.infos, strict=False)  # an environment may give none
            told = {slot: str(info["failed"]) for slot, info in infos if "failed" in info}
            return {**not_finite(slots, steps.observations, steps.rewards), **told}, steps
        except NotAsDeclared as error:
            raise RecipeError.at("body.type", str(error)) from error
        except Exception as error:  # noqa: BLE001 - as above
            return dict.fromkeys(slots, _reason(error)), _no_steps()

    def close(self) -> None:
        """See `Worlds`."""
        self._environment.close()


class ProcessWorlds:
    """See `Worlds`. Environments in processes next to this one; where one is lost, its episodes fail."""

    def __init__(self, config: BodyConfig, chunk: int) -> None:
        """Divide episodes among processes, which start when they are needed."""
        num, count = config.num_environments, min(config.processes, config.num_environments)
        self._shares = [range(num * k // count, num * (k + 1) // count) for k in range(count)]
        spaces, self.repeats_starts = _opened(config.model_dump_json())
        self._processes = [EnvironmentProcess(config, spaces, len(share), chunk) for share in self._shares]

    def halves(self) -> Sequence[Sequence[int]]:
        """See `Worlds`. Each process has a part of both."""
        first = [slot for share in self._shares for slot in share[: -(-len(share) // 2)]]
        second = [slot for share in self._shares for slot in share[-(-len(share) // 2) :]]
        return [first, second] if second else [first]

    def reset(self, slots: Sequence[int], tasks: Sequence[Task], seeds: Sequence[int]) -> tuple[Failures, Observations]:
        """See `Worlds`."""
        given = {slot: (task, seed) for slot, task, seed in zip(slots, tasks, seeds, strict=True)}

        def begin(process: EnvironmentProcess, share: range, mine: Sequence[int]) -> Observations:
            pairs = [given[slot] for slot in mine]
            return process.reset([slot - share.start for slot in mine], *map(list, zip(*pairs, strict=True)))

        failures, found = self._each(slots, begin)
        seen = _joined(slots, [(mine, one) for mine, one in found])
        return {**not_finite(slots, seen), **failures}, seen

    def begin_step(self, slots: Sequence[int], actions: NDArray[np.generic]) -> None:
        """See `Worlds`."""
        place = {slot: row for row, slot in enumerate(slots)}
        for process, share in zip(self._processes, self._shares, strict=True):
            if mine := [slot for slot in slots if slot in share]:
                process.begin_step([slot - share.start for slot in mine], actions[[place[slot] for slot in mine]])

    def finish_step(self, slots: Sequence[int]) -> tuple[Failures, Steps]:
        """See `Worlds`."""

        def finish(process: EnvironmentProcess, share: range, mine: Sequence[int]) -> Steps:
            return process.finish_step([slot - share.start for slot in mine])

        failures, found = self._each(slots, finish)
        told = {
            slot: str(info["failed"])
            for mine, steps in found
            for slot, info in zip(mine, steps.infos, strict=False)
            if "failed" in info
        }
        steps = _joined_steps(slots, found)
        return {**not_finite(slots, steps.observations, steps.rewards), **failures, **told}, steps

    def _each(
        self, slots: Sequence[int], ask: Callable[[EnvironmentProcess, range, Sequence[int]], Found]
    ) -> tuple[dict[int, str], list[tuple[Sequence[int], Found]]]:
        """What processes answer about their slots, and why those of others have failed."""
        failures: dict[int, str] = {}
        found: list[tuple[Sequence[int], Found]] = []
        for process, share in zip(self._processes, self._shares, strict=True):
            mine = [slot for slot in slots if slot in share]
            if not mine:
                continue
            try:
                found.append((mine, ask(process, share, mine)))
            except EnvironmentLost as error:
                failures |= dict.fromkeys(mine, str(error))
        return failures, found

    def close(self) -> None:
        """See `Worlds`."""
        for process in self._processes:
            process.close()


def _joined(slots: Sequence[int], found: Sequence[tuple[Sequence[int], Observations]]) -> Observations:
    """Observations of several processes in the order of slots; zeros for those that none has answered about."""
    if not found:
        return _nothing()
    rows = _rows(slots, [mine for mine, _ in found])
    images = {name: _taken([one.images[name] for _, one in found], rows) for name in found[0][1].images}
    words = ["", *(text for _, one in found for text in one.instructions)]
    state = _taken([one.state for _, one in found], rows)
    return Observations(images, state, tuple(words[row + 1] for row in rows))


def _joined_steps(slots: Sequence[int], found: Sequence[tuple[Sequence[int], Steps]]) -> Steps:
    """Steps of several processes, likewise."""
    if not found:
        return _no_steps()
    rows = _rows(slots, [mine for mine, _ in found])
    steps = [one for _, one in found]
    infos = [{}, *(info for one in steps for info in one.infos or ({},) * len(one.num_steps))]
    return Steps(
        _joined(slots, [(mine, one.observations) for mine, one in found]),
        _taken([one.rewards for one in steps], rows),
        _taken([one.num_steps for one in steps], rows),
        _taken([one.terminated for one in steps], rows),
        _taken([one.truncated for one in steps], rows),
        _taken([one.success for one in steps], rows),
        tuple(infos[row + 1] for row in rows),
    )


def _rows(slots: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    """Place of each slot in the parts, one after the other; -1 if it is in none."""
    places = {slot: row for row, slot in enumerate(slot for part in parts for slot in part)}
    return [places.get(slot, -1) for slot in slots]


def _taken(parts: Sequence[NDArray[Number]], rows: Sequence[int]) -> NDArray[Number]:
    """Rows of parts that are put together, with zeros for -1."""
    whole = np.concatenate([*parts, np.zeros_like(parts[0][:1])])
    taken: NDArray[Number] = whole[list(rows)]
    return taken


@cache
def _opened(text: str) -> tuple[Spaces, bool]:
    """What an environment shows and takes, and whether its starts repeat."""
    environment = open_body(BodyConfig.model_validate_json(text), 1)
    try:
        return environment.spaces, environment.repeats_starts
    finally:
        environment.close()


def spaces_of(config: BodyConfig) -> Spaces:
    """What the environment of a recipe shows and takes; errors as of `open_body`."""
    return _opened(config.model_dump_json())[0]


def open_worlds(config: BodyConfig, chunk: int) -> Worlds:
    """Open the environments of a rank, for decisions of some steps; errors as of `open_body`."""
    if config.processes:
        return ProcessWorlds(config, chunk)
    return OwnWorlds(open_body(config, config.num_environments), config.num_environments)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> Observations:
    return Observations({}, np.zeros((0, 0), np.float32), ())


def _no_steps() -> Steps:
    none = np.zeros(0, np.bool_)
    return Steps(_nothing(), np.zeros((0, 0), np.float32), np.zeros(0, np.int64), none, none, none)
