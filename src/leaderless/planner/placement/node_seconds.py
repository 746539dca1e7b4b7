"""Seconds of each node on each number of shards, in steps drawn from measured lengths, and the laws of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, combinations
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from leaderless.config import Recipe
from leaderless.planner.placement.stage_seconds import Point, Profile, StageSeconds
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import PlannedNode

NUM_DRAWS = 16
"""Steps that are drawn: the mean of the slowest shard depends on the tail of the lengths."""
MAX_DRAWN = 1 << 16
"""Samples that are drawn in all; of large steps fewer are."""
LAST_TURNS = 16
"""Turns at the places of an engine that are followed one by one; before these, all places are about equally busy."""

Lengths = NDArray[np.int64]
Seconds = NDArray[np.float64]
Values = TypeVar("Values", Lengths, Seconds)


class Rates(NamedTuple):
    """Seconds for the share of each rank in an engine that begins the next response as soon as one has ended.

    Attributes:
        work: [draws, shards] seconds for which the share takes up the engine: what a step costs is shared by the
            responses in progress.
        alone: [draws, shards] seconds until its last response has ended, if the engine has nothing else to do.
        longest: [draws, shards] the part of `alone` in which the longest response is waited for, at the pace of an
            engine that has nothing else to do; zeros if other responses do not slow it down.
    """

    work: Seconds
    alone: Seconds
    longest: Seconds


class StepSeconds:
    """Seconds of nodes in drawn steps.

    Attributes:
        num_draws: Number of steps.
    """

    def __init__(self, profile: Profile, recipe: Recipe) -> None:
        """Draw the lengths of some steps, always the same ones."""
        self._profile, self._recipe = profile, recipe
        siblings = recipe.batch.responses_per_prompt
        self._prompts = recipe.batch.prompts_per_step
        self.num_draws = max(2, min(NUM_DRAWS, MAX_DRAWN // (self._prompts * siblings)))
        lengths = np.array(profile.lengths or (1,), dtype=np.int64)
        groups = _in_groups(lengths, siblings)
        chosen = np.random.default_rng(0).integers(len(groups), size=(self.num_draws, self._prompts))
        self._lengths: Lengths = groups[chosen]
        waits = np.array(profile.waits or (0.0,) * len(lengths), dtype=np.float64)
        self._waits: Seconds = _in_groups(waits, siblings)[chosen]
        self._episodes = recipe.environment.concurrency if recipe.environment else 1
        self._known: dict[tuple[str, int, int, bool], Seconds] = {}

    def is_graded_ahead(self, node: PlannedNode) -> bool:
        """Whether other processes compute the node's rewards while its ranks generate."""
        return node.is_graded_ahead(self._recipe)

    def of(self, node: PlannedNode, num_shards: int, *, is_balanced: bool) -> Seconds:
        """[draws] seconds of the slowest shard.

        Shards are balanced, with about as many tokens each, where rows come from other ranks; else each shard has the
        rows that it sampled.
        """
        seconds: Seconds = self.of_windows(node, num_shards, 1, is_balanced=is_balanced)[0]
        return seconds

    def of_windows(self, node: PlannedNode, num_shards: int, num_windows: int, *, is_balanced: bool) -> Seconds:
        """[windows, draws] seconds of the slowest shard in each window, which is a part of each shard's prompts."""
        key = (node.name, num_shards, num_windows, is_balanced)
        if key not in self._known:
            law = self._profile.stages.get(node.name, StageSeconds())
            slowest = self._balanced if is_balanced else self._own
            self._known[key] = slowest(law, num_shards, num_windows)
        return self._known[key]

    def _balanced(self, law: StageSeconds, num_shards: int, num_windows: int) -> Seconds:
        rows, tokens, longest = self._totals
        parts = num_shards * num_windows
        places = max(1, law.places)
        fullest = (tokens + law.pause_tokens * rows) / parts / places + (1 - 1 / places) * longest
        seconds = law.fixed_s + (law.row_s * rows + law.token_s * tokens) / parts
        seconds = seconds + law.longest_s * longest + law.place_s * fullest
        return np.broadcast_to(seconds, (num_windows, self.num_draws))

    def _own(self, law: StageSeconds, num_shards: int, num_windows: int) -> Seconds:
        parts = self._of_parts(law, [1] * (num_shards * num_windows)).alone
        windows: Seconds = parts.reshape(self.num_draws, num_shards, num_windows).max(axis=1).T
        return windows

    def rates(self, node: PlannedNode, portions: Sequence[int]) -> Rates:
        """Seconds of a node for shards that divide prompts in the proportion of some portions, and never pause."""
        return self._of_parts(self._profile.stages.get(node.name, StageSeconds()), portions)

    def _of_parts(self, law: StageSeconds, portions: Sequence[int]) -> Rates:
        """[draws, parts] of rows that their parts keep; parts have prompts in the proportion of some portions."""
        ends = np.cumsum(portions) * self._prompts // sum(portions)
        begins = np.append(0, ends[:-1])
        sizes = (ends - begins) * self._lengths.shape[2]
        begins = np.minimum(begins, self._prompts - 1)  # of parts without a prompt
        tokens = np.add.reduceat(self._lengths.sum(axis=2), begins, axis=1)
        longest = law.longest_s * np.maximum.reduceat(self._lengths.max(axis=2), begins, axis=1)
        linear = law.fixed_s + law.row_s * sizes + law.token_s * tokens
        alone, work = linear + longest, linear + law.longest_s * tokens / self._recipe.rollout.max_sequences
        if law.waits:
            paths = law.longest_s * self._lengths + self._waits
            played = np.add.reduceat(paths.sum(axis=2), begins, axis=1) / self._episodes
            alone = linear + np.maximum(np.maximum.reduceat(paths.max(axis=2), begins, axis=1), played)
            work = np.maximum(work, played)
        if law.place_s:
            alone = alone + law.place_s * self._fullest(law, sizes)
            work = work + law.place_s * (tokens + law.pause_tokens * sizes) / law.places
        return Rates(np.minimum(work, alone), alone, longest)

    def _fullest(self, law: StageSeconds, sizes: Lengths) -> Seconds:
        """[draws, parts] tokens of the fullest place, for parts of these numbers of rows one after the other."""
        lengths = self._lengths.reshape(self.num_draws, -1) + law.pause_tokens
        is_row = np.arange(sizes.max()) < sizes[:, None]
        padded = np.zeros((self.num_draws, *is_row.shape))
        padded[:, is_row] = lengths
        return fullest_place(padded, law.places)

    @cached_property
    def _totals(self) -> tuple[int, Lengths, Lengths]:
        """Rows of a step; [draws] tokens, and tokens of the longest row."""
        lengths = self._lengths.reshape(self.num_draws, -1)
        return lengths.shape[1], lengths.sum(axis=1), lengths.max(axis=1)


def _in_groups(values: Values, siblings: int) -> Values:
    """[groups, siblings] of values next to each other; of too few for a group they are repeated."""
    groups = values[: len(values) // siblings * siblings].reshape(-1, siblings)
    return groups if len(groups) else np.resize(values, (1, siblings))


def has_own_rows(node: PlannedNode, plan: Plan) -> bool:
    """Whether a node works on the rows that its ranks sampled, so that nothing has been balanced."""
    samplers = [one for one in plan.nodes if one.spec.samples]
    return any(one.layout.holds_rows_like(node.layout) for one in samplers) or not samplers


def fullest_place(tokens: Seconds, places: int) -> Seconds:
    """The tokens of the place that has the most, if each response takes the place that is free first.

    Args:
        tokens: [..., rows] of responses in order; zeros, as after the last one of a shard, change nothing.
        places: Number of places, at least 1.

    Returns:
        [...] tokens.
    """
    num_rows = tokens.shape[-1]
    if num_rows <= places:
        return np.asarray(tokens.max(axis=-1))
    first = max(places, num_rows - LAST_TURNS * places)
    busy = tokens[..., :places].copy()
    busy += tokens[..., places:first].sum(axis=-1, keepdims=True) / places
    for row in range(first, num_rows):
        place = busy.argmin(axis=-1)[..., None]
        np.put_along_axis(busy, place, np.take_along_axis(busy, place, axis=-1) + tokens[..., row, None], axis=-1)
    return np.asarray(busy.max(axis=-1))


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


def fit_seconds(points: list[Point], places: int = 0) -> StageSeconds:
    """The law with non-negative terms that has the least relative error over measured points.

    Of laws that are about as good, the one with the fewest terms is taken: seconds of a stage that was measured at one
    size only are then in proportion to it. Sampling may also be explained by responses that take turns at places. A law
    of tokens and of the longest response holds for shards of about as many rows as were measured, this one for any.
    The number of places is found, too, if it is 0; with a known one there are no pauses, and tokens may take time, too.
    """
    values = np.array([point[:4] for point in points], dtype=np.float64)
    terms = dict(zip(("row_s", "token_s", "longest_s"), values.T, strict=False)) | {"fixed_s": np.ones(len(values))}
    best = _Law(StageSeconds(), float("inf"))
    for chosen in chain.from_iterable(combinations(LINEAR, size) for size in (1, 2, 3, 4)):
        best = _better(best, {name: terms[name] for name in chosen}, values[:, 3])
    if any(any(point.waits) for point in points):
        best = _with_waits(best, points, values[:, 3])
    elif all(point.lengths for point in points):
        best = _with_places(best, points, values[:, 3], places)
    return best.stage


def _with_places(best: _Law, points: list[Point], seconds: Seconds, known: int) -> _Law:
    """A law of responses that take turns, if that is better."""
    most = max(len(point.lengths) for point in points)
    lengths = np.array([[*point.lengths, *[0] * (most - len(point.lengths))] for point in points], dtype=np.float64)
    mean = float(lengths.sum() / (lengths > 0).sum())
    places = [known] if known else [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    fixed, tokens = {"fixed_s": np.ones(len(points))}, {"token_s": lengths.sum(axis=1)}
    others_of: list[dict[str, Seconds]] = [{}, fixed, *([tokens, fixed | tokens] if known else [])]
    for pause, number in ((mean * share, number) for share in PAUSES[: 1 if known else None] for number in places):
        fullest = fullest_place(np.where(lengths > 0, lengths + pause, 0.0), number)
        for others in others_of:
            best = _better(best, {"place_s": fullest} | others, seconds, {"places": number, "pause_tokens": pause})
    return best


def _with_waits(best: _Law, points: list[Point], seconds: Seconds) -> _Law:
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
    terms: dict[str, Seconds],
    seconds: Seconds,
    facts: dict[str, float] | None = None,
    known: Seconds | float = 0.0,
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
