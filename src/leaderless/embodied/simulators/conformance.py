"""Checks that every environment of bodies must pass; one suite for all of them, users' too.

In a test: `@pytest.mark.parametrize("check", CHECKS)`, and then `check(make)`, where `make(num)` makes the environment.
By hand: `python -m leaderless.embodied.simulators.conformance TYPE '{"option": 1}'`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from leaderless.config.environment import BodyConfig
from leaderless.embodied.simulators.protocol import (
    Continuous,
    NotAsDeclared,
    Observations,
    Steps,
    VectorEnvironment,
    check_seen,
    check_steps,
    not_finite,
)
from leaderless.embodied.simulators.registry import find_body

Make = Callable[[int], VectorEnvironment]
"""Makes an environment with room for some episodes."""
CANNOT_SAVE = "cannot be saved"
SEEDS = (11, 12, 13, 14)


class NotConforming(AssertionError):  # noqa: N818 - a plain word for users
    """The environment breaks a rule; the first argument says which and how."""


@dataclass(frozen=True)
class _Path:
    """Observations and rewards of one episode, action after action."""

    seen: list[Observations]
    rewards: list[float]
    is_terminated: bool
    is_truncated: bool


def spaces_hold(make: Make) -> None:
    """Observations have the shapes and types that are declared, and hold finite numbers."""
    with _open(make, 2) as one:
        seen = _reset(one, [0, 1], SEEDS[:2])
        _check(one, seen, 2)
        for chunk in (1, 3):
            steps = one.step([1], _actions(one, 1, chunk, chunk))
            _check(one, steps.observations, 1, steps, chunk)


def same_start(make: Make) -> None:
    """The same task and seed give the same start, bit for bit, in any slot and whatever was before."""
    with _open(make, 2) as one:
        first = _reset(one, [0, 1], [SEEDS[0]] * 2)
        _equal(_row(first, 0), _row(first, 1), "two episodes with one seed begin differently")
        one.step([0], _actions(one, 1, 3, 0))
        again = _reset(one, [0], SEEDS[:1])
        _equal(_row(first, 0), again, "an episode begins differently after another one in its slot")
        first_path, second_path = (_play(one, slot, SEEDS[0], 5) for slot in (0, 1))
        _same_path(first_path, second_path, "two episodes with one seed and the same actions")


def seeds_differ(make: Make) -> None:
    """Different seeds give different starts."""
    with _open(make, 1) as one:
        starts = [_reset(one, [0], [seed]) for seed in SEEDS]
        is_equal = [_differs(starts[0], other) is None for other in starts[1:]]
        _require(not all(is_equal), f"seeds {SEEDS} all begin with the same observation: draw the start from the seed")


def others_stay(make: Make) -> None:
    """Resetting and stepping some episodes leaves the others as they are, bit for bit."""
    with _open(make, 3) as one:
        alone = _play(one, 1, SEEDS[1], 6)
        _reset(one, [0, 1, 2], [SEEDS[0], SEEDS[1], SEEDS[2]])

        def disturb() -> None:
            _reset(one, [2], [SEEDS[3]])
            one.step([2, 0], _actions(one, 2, 2, 5))
            _reset(one, [0], [SEEDS[0]])

        _same_path(alone, _play(one, 1, SEEDS[1], 6, between=disturb), "an episode next to others")


def rows_follow_the_order(make: Make) -> None:
    """Rows are in the order that was asked for."""
    with _open(make, 2) as one:
        forth = _reset(one, [0, 1], SEEDS[:2])
        back = _reset(one, [1, 0], [SEEDS[1], SEEDS[0]])
        _equal(_row(forth, 0), _row(back, 1), "reset([1, 0]) does not give episode 0 in its second row")
        _equal(_row(forth, 1), _row(back, 0), "reset([1, 0]) does not give episode 1 in its first row")


def chunks_equal_single_steps(make: Make) -> None:
    """A chunk does what its actions do one by one, stops where the episode ends, and shows what was seen last."""
    with _open(make, 1) as one:
        single = _play(one, 0, SEEDS[0], one.spaces.max_steps + 1)
        count = len(single.rewards)
        _require(
            single.is_terminated or single.is_truncated,
            f"an episode does not end after max_steps={one.spaces.max_steps} steps",
        )
        for chunk in (7, count + 5):
            start = _reset(one, [0], SEEDS[:1])
            done, steps = 0, None
            while done < count:
                steps = one.step([0], _actions_from(one, SEEDS[0], done, chunk))
                _check(one, steps.observations, 1, steps, chunk)
                num = int(steps.num_steps[0])
                _require(num == min(chunk, count - done), f"a chunk of {chunk} took {num} steps at step {done}")
                earned = np.array(single.rewards[done : done + num], np.float32)
                _require(bool((steps.rewards[0, :num] == earned).all()), f"rewards in a chunk of {chunk} differ")
                done += num
            assert steps is not None
            _require(bool(steps.terminated[0]) == single.is_terminated, "a chunk terminates where single steps do not")
            _require(bool(steps.truncated[0]) == single.is_truncated, "a chunk truncates where single steps do not")
            _equal(single.seen[-1], steps.observations, f"the last observation after chunks of {chunk}")
            _require(
                _differs(start, steps.observations) is not None,
                "the last observation is that of a new episode: show what the ended episode showed last",
            )


def ends_are_told_apart(make: Make) -> None:
    """An episode terminates or is truncated, not both, and is truncated after `max_steps`."""
    with _open(make, 1) as one:
        for seed in SEEDS[:2]:
            path = _play(one, 0, seed, one.spaces.max_steps + 1)
            count = len(path.rewards)
            _require(not (path.is_terminated and path.is_truncated), "an episode was terminated and truncated")
            limit = one.spaces.max_steps
            _require(count <= limit, f"an episode has {count} steps, more than max_steps={limit}")
            _require(path.is_terminated or path.is_truncated, f"an episode does not end after {count} steps")


def saved_states_continue(make: Make) -> None:
    """A saved state continues in another slot as it would have continued, bit for bit, to its end.

    An environment whose `save` raises NotImplementedError cannot be saved, and nothing else is asked of it.
    """
    with _open(make, 2) as one:
        _reset(one, [0, 1], SEEDS[:2])
        for step in range(3):
            if _is_over(one.step([0], _actions_from(one, SEEDS[0], step, 1))):
                break
        else:
            states = one.save([0])
            before = one.save([0])
            _require(states == before, "saving twice gives different states")
            ahead = _follow(one, 0, 3, one.spaces.max_steps)
            _reset(one, [1], [SEEDS[2]])
            shown = one.restore([1], states)
            _check(one, shown, 1)
            _same_path(ahead, _follow(one, 1, 3, one.spaces.max_steps), "an episode continued from a saved state")
            _equal(shown, one.restore([0], states), "one state restored in two slots")


def experts_act(make: Make) -> None:
    """An expert's actions are what the environment takes; without an expert, NotImplementedError is raised."""
    with _open(make, 2) as one:
        _reset(one, [0, 1], SEEDS[:2])
        try:
            actions = one.expert([1, 0])
        except NotImplementedError:
            return
        space = one.spaces.actions
        if isinstance(space, Continuous):
            _require(actions.shape == (2, space.dim), f"an expert's actions have the shape {actions.shape}")
            _require(actions.dtype == np.float32, f"an expert's actions are {actions.dtype}, not float32")
            _require(bool(np.isfinite(actions).all()), "an expert's actions are not finite")
        else:
            _require(actions.shape == (2,), f"an expert's choices have the shape {actions.shape}")
            _require(actions.dtype == np.int64, f"an expert's choices are {actions.dtype}, not int64")
            choices = actions.tolist()
            is_choice = [0 <= choice < space.num_choices for choice in choices]
            _require(all(is_choice), f"an expert's choices {choices} are not below {space.num_choices}")
        one.step([1, 0], actions[:, None])


def closes_twice(make: Make) -> None:
    """It can be closed twice, also before it was used."""
    one = make(1)
    one.close()
    try:
        one.close()
    except Exception as error:
        raise NotConforming(f"the second close() raises {type(error).__name__}: {error}") from error


CHECKS: tuple[Callable[[Make], None], ...] = (
    spaces_hold,
    same_start,
    seeds_differ,
    others_stay,
    rows_follow_the_order,
    chunks_equal_single_steps,
    ends_are_told_apart,
    saved_states_continue,
    experts_act,
    closes_twice,
)
"""All checks; each takes a maker, and raises `NotConforming` for a broken rule."""


def report(make: Make) -> dict[str, str]:
    """Result of each check: `held`, `cannot be saved`, or what is wrong."""
    found = {}
    for check in CHECKS:
        try:
            check(make)
            found[check.__name__] = "held"
        except NotImplementedError:
            found[check.__name__] = CANNOT_SAVE
        except NotConforming as broken:
            found[check.__name__] = str(broken)
    return found


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise NotConforming(text)


@contextmanager
def _open(make: Make, num: int) -> Iterator[VectorEnvironment]:
    one = make(num)
    try:
        yield one
    finally:
        one.close()


def _reset(one: VectorEnvironment, which: Sequence[int], seeds: Sequence[int]) -> Observations:
    return one.reset(which, [{}] * len(which), seeds)


def _actions(one: VectorEnvironment, num: int, chunk: int, seed: int) -> NDArray[np.generic]:
    """Random actions for some episodes."""
    chance, space = np.random.default_rng(seed), one.spaces.actions
    if isinstance(space, Continuous):
        low, high = np.array(space.low, np.float32), np.array(space.high, np.float32)
        return chance.uniform(low, high, (num, chunk, space.dim)).astype(np.float32)
    return chance.integers(space.num_choices, size=(num, chunk))


def _actions_from(one: VectorEnvironment, seed: int, step: int, chunk: int) -> NDArray[np.generic]:
    """[1, chunk] actions of an episode from a step; a step's actions depend on nothing else."""
    return np.concatenate([_actions(one, 1, 1, seed * 10_000 + step + place) for place in range(chunk)], axis=1)


def _is_over(steps: Steps) -> bool:
    return bool(steps.terminated[0] or steps.truncated[0])


def _play(one: VectorEnvironment, slot: int, seed: int, limit: int, between: Callable[[], None] | None = None) -> _Path:
    """Play an episode by single steps, with something in between."""
    start = _reset(one, [slot], [seed])
    rest = _follow(one, slot, 0, limit, seed, between)
    return _Path([start, *rest.seen], rest.rewards, rest.is_terminated, rest.is_truncated)


def _follow(
    one: VectorEnvironment,
    slot: int,
    step: int,
    limit: int,
    seed: int = SEEDS[0],
    between: Callable[[], None] | None = None,
) -> _Path:
    path = _Path([], [], is_terminated=False, is_truncated=False)
    for place in range(limit):
        if between is not None:
            between()
        steps = one.step([slot], _actions_from(one, seed, step + place, 1))
        path.seen.append(steps.observations)
        path.rewards.append(float(steps.rewards[0, 0]))
        if _is_over(steps):
            return _Path(path.seen, path.rewards, bool(steps.terminated[0]), bool(steps.truncated[0]))
    return path


def _row(seen: Observations, row: int) -> Observations:
    images = {name: pixels[row : row + 1] for name, pixels in seen.images.items()}
    return Observations(images, seen.state[row : row + 1], seen.instructions[row : row + 1])


def _differs(one: Observations, other: Observations) -> str | None:
    """Where two observations differ; None if they are equal, bit for bit."""
    for name, pixels in one.images.items():
        if pixels.tobytes() != other.images[name].tobytes():
            return f"camera '{name}'"
    if one.state.tobytes() != other.state.tobytes():
        return f"the state, by up to {np.abs(one.state - other.state).max():.2g}"
    return None if one.instructions == other.instructions else "the instruction"


def _equal(one: Observations, other: Observations, what: str) -> None:
    difference = _differs(one, other)
    _require(difference is None, f"{what}: {difference} differs")


def _same_path(one: _Path, other: _Path, what: str) -> None:
    for step, (seen, again) in enumerate(zip(one.seen, other.seen, strict=False)):
        _equal(seen, again, f"{what}, after {step} steps")
    _require(one.rewards == other.rewards, f"{what}: rewards differ")
    ends = [(path.is_terminated, path.is_truncated) for path in (one, other)]
    _require(ends[0] == ends[1], f"{what}: (terminated, truncated) are {ends[0]} and {ends[1]}")


def _check(one: VectorEnvironment, seen: Observations, num: int, steps: Steps | None = None, chunk: int = 0) -> None:
    """Check what is seen, after steps if there were some."""
    try:
        if steps is None:
            check_seen(one.spaces, seen, num)
        else:
            check_steps(one.spaces, steps, num, chunk)
    except NotAsDeclared as error:
        raise NotConforming(str(error)) from error
    for problem in not_finite(range(num), seen, None if steps is None else steps.rewards).values():
        raise NotConforming(problem)


def main() -> None:
    """Say for one environment which rules hold; the exit status is 1 if one does not."""
    arguments = sys.argv[1:]
    if not 1 <= len(arguments) <= 2:
        raise SystemExit("usage: python -m leaderless.embodied.simulators.conformance TYPE ['{\"option\": value}']")
    options = json.loads(arguments[1]) if len(arguments) == 2 else {}
    found = find_body(BodyConfig(type=arguments[0], options=options))
    said = report(partial(found, **options))
    for check, result in said.items():
        print(f"{check:28} {result}")  # noqa: T201 - what the command is for
    sys.exit(any(result not in {"held", CANNOT_SAVE} for result in said.values()))


if __name__ == "__main__":
    main()
