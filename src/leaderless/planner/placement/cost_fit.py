"""Laws of the seconds that stages take, fitted to measured ones."""

from __future__ import annotations

from itertools import chain, combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.placement.node_seconds import fullest_place
from leaderless.planner.placement.stage_seconds import Point, StageSeconds

Values = NDArray[np.float64]

LEAST_S = 1e-3
"""Seconds below which the error of a measurement counts as if it took as long."""
ENOUGH, NOTHING = 1.02, 1e-6
"""A law of more terms is taken if the error of the one of fewer is this many times its own, and larger by as much."""
PAUSES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Times for which a response keeps its place without sampling, as multiples of the mean length."""
LINEAR = ("token_s", "row_s", "fixed_s", "longest_s")
"""Terms of a law in the order in which they are preferred where several explain what was measured."""
PACES = tuple(part / 8 for part in range(9))
"""Seconds per token of the episode that ends last, as parts of the most that they can be."""


class _Law(NamedTuple):
    """A law, and the root of its mean squared relative error."""

    stage: StageSeconds
    error: float


def fit_seconds(points: list[Point]) -> StageSeconds:
    """The law with non-negative terms that has the least relative error over measured points.

    Of laws that are about as good, the one with the fewest terms is taken: seconds of a stage that was measured at one
    size only are then in proportion to it. Sampling may also be explained by responses that take turns at places. A law
    of tokens and of the longest response holds for shards of about as many rows as were measured, this one for any.
    """
    values = np.array([point[:4] for point in points], dtype=np.float64)
    terms = dict(zip(("row_s", "token_s", "longest_s"), values.T, strict=False)) | {"fixed_s": np.ones(len(values))}
    best = _Law(StageSeconds(), float("inf"))
    for chosen in chain.from_iterable(combinations(LINEAR, size) for size in (1, 2, 3, 4)):
        best = _better(best, {name: terms[name] for name in chosen}, values[:, 3])
    if any(any(point.waits) for point in points):
        best = _with_waits(best, points, values[:, 3])
    elif all(point.lengths for point in points):
        best = _with_places(best, points, values[:, 3])
    return best.stage


def _with_places(best: _Law, points: list[Point], seconds: Values) -> _Law:
    """A law of responses that take turns, if that is better."""
    most = max(len(point.lengths) for point in points)
    lengths = np.array([[*point.lengths, *[0] * (most - len(point.lengths))] for point in points], dtype=np.float64)
    mean = float(lengths.sum() / (lengths > 0).sum())
    places = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    for pause, number in ((mean * share, number) for share in PAUSES for number in places):
        fullest = fullest_place(np.where(lengths > 0, lengths + pause, 0.0), number)
        for others in ({}, {"fixed_s": np.ones(len(points))}):
            best = _better(best, {"place_s": fullest} | others, seconds, {"places": number, "pause_tokens": pause})
    return best


def _with_waits(best: _Law, points: list[Point], seconds: Values) -> _Law:
    """A law of episodes that wait for their environments, if that is better.

    The episode that ends last takes its waits, and each of its tokens takes what a step of the engine takes. Waits are
    known, so that only the rest of the seconds is explained by other terms.
    """
    left = [point.seconds - max(point.waits, default=0.0) for point in points]
    most = max(0.0, *(rest / max(1.0, point.longest) for rest, point in zip(left, points, strict=True)))
    values = np.array([point[:2] for point in points], dtype=np.float64)
    terms = {"token_s": values[:, 1], "fixed_s": np.ones(len(points))}
    for pace in (most * share for share in PACES):
        paths = [zip(point.waits, point.lengths, strict=False) for point in points]
        path = np.array([max((wait + pace * tokens for wait, tokens in some), default=0.0) for some in paths])
        for names in ((), ("fixed_s",), ("token_s",), ("token_s", "fixed_s")):
            facts = {"longest_s": pace, "waits": True}
            best = _better(best, {name: terms[name] for name in names}, seconds, facts, path)
    return best


def _better(
    best: _Law,
    terms: dict[str, Values],
    seconds: Values,
    facts: dict[str, float] | None = None,
    known: Values | float = 0.0,
) -> _Law:
    """The law of these terms, if it is clearly better than the best so far; some of the seconds may be known."""
    weights = 1 / np.maximum(seconds, LEAST_S)
    columns = np.array(list(terms.values())).reshape(-1, len(seconds)).T * weights[:, None]
    wanted = (seconds - known) * weights
    solution = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    off = columns @ solution - wanted
    error = float(np.square(off).mean()) ** 0.5
    if (solution < 0).any() or error * ENOUGH + NOTHING >= best.error:
        return best
    found = dict(zip(terms, solution.tolist(), strict=True)) | (facts or {})
    return _Law(StageSeconds.model_validate(found | {"error": float(np.abs(off).mean())}), error)
