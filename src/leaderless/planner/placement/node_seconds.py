"""Seconds of each node on each number of shards, in some steps drawn from measured lengths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from leaderless.config import Recipe
from leaderless.planner.placement.stage_seconds import Profile, StageSeconds
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

        Args:
            node: Node that runs.
            num_shards: Shards of rows.
            is_balanced: Whether rows come from other ranks, so that shards have about as many tokens; else each shard
                has the rows that it sampled.
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
