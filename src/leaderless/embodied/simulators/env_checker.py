"""Whether what an environment shows and does is as it declares. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from leaderless.embodied.simulators.protocol import Floats, Observations, Spaces, Steps

REMEDY = (
    "correct the environment, or the `spaces` that it declares; `python -m leaderless.embodied.simulators.conformance "
    "TYPE` checks it"
)


class NotAsDeclared(ValueError):  # noqa: N818 - a plain word for users
    """An environment has shown or done something else than it declares; the text says what and what to do."""


def check_seen(spaces: Spaces, seen: Observations, num: int) -> None:
    """Check what `num` episodes show, without a look at pixels.

    Raises:
        NotAsDeclared: It has other cameras, shapes or types, or no instruction where there has to be one.
    """
    _require(isinstance(seen, Observations), f"observations are {type(seen).__name__}, not Observations")
    _require(set(seen.images) == set(spaces.images), f"cameras {list(seen.images)}, declared {list(spaces.images)}")
    for name, (height, width) in spaces.images.items():
        _require_array(f"camera '{name}'", seen.images[name], (num, height, width, 3), np.uint8)
    _require_array("the state", seen.state, (num, spaces.state_size), np.float32)
    _require(len(seen.instructions) == num, f"{len(seen.instructions)} instructions for {num} episodes")
    has_words = all(map(bool, seen.instructions))
    _require(
        has_words == spaces.has_instructions,
        f"has_instructions={spaces.has_instructions} is not what is shown, such as {seen.instructions[0]!r}",
    )


def check_steps(spaces: Spaces, steps: Steps, num: int, chunk: int) -> None:
    """Check what a chunk of actions has done in `num` episodes; numbers of failed ones mean nothing.

    Raises:
        NotAsDeclared: Shapes or types are others, or a chunk did not stop where the episode ended, and only there.
    """
    _require(isinstance(steps, Steps), f"steps are {type(steps).__name__}, not Steps")
    check_seen(spaces, steps.observations, num)
    _require_array("rewards", steps.rewards, (num, chunk), np.float32)
    for name in ("terminated", "truncated", "success"):
        _require_array(name, getattr(steps, name), (num,), np.bool_)
    counts = steps.num_steps
    _require_array("num_steps", counts, (num,), np.int64)
    _require(len(steps.infos) in {0, num}, f"{len(steps.infos)} infos for {num} episodes")
    is_whole = np.array(["failed" not in info for info in steps.infos], np.bool_) if steps.infos else np.True_
    if (((counts < 1) | (counts > chunk)) & is_whole).any():  # the text takes longer than all else
        _require(False, f"num_steps={counts} of a chunk of {chunk}")
    late = (np.arange(chunk) >= counts[:, None]) & np.reshape(is_whole, (-1, 1))
    _require(not steps.rewards[late].any(), "there are rewards for steps after the end of an episode")
    short = (counts < chunk) & ~(steps.terminated | steps.truncated) & is_whole
    _require(not short.any(), "a chunk stopped although the episode goes on")


def not_finite(slots: Sequence[int], seen: Observations, rewards: Floats | None = None) -> dict[int, str]:
    """Why episodes cannot be judged: a number of the state, or a reward, is NaN or infinite; by their number."""
    found: dict[int, str] = {}
    for what, values in (("state", seen.state), ("reward", rewards)):
        if values is None or bool(np.isfinite(values).all()):
            continue
        for row, place in np.argwhere(~np.isfinite(values)).tolist():
            where = f"number {place} of the state" if what == "state" else f"the reward of step {place}"
            found.setdefault(slots[row], f"{where} is {values[row, place]} in environment {slots[row]}")
    return found


def _require_array(what: str, values: object, shape: tuple[int, ...], kind: type[np.generic]) -> None:
    if isinstance(values, np.ndarray) and values.shape == shape and values.dtype == kind:
        return
    came = f"{values.dtype} {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
    raise NotAsDeclared(f"{what} is {came}, not {np.dtype(kind).name} {shape}: {REMEDY}")


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise NotAsDeclared(f"{problem}: {REMEDY}")
