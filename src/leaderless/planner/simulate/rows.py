"""The rows of a simulated step: how long they are, how many bytes their columns take, and which rank holds which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from leaderless.config import Recipe
from leaderless.planner import Layout, Load, Plan, PlannedNode, Reshard
from leaderless.planner.assign.balance import (
    assign,
    at_places,
    by_part,
    first_places,
    is_repeated,
    parts_of,
    sequence_cost,
)
from leaderless.planner.assign.blocks import BlockUnits, Mesh, Shards, assign_in_blocks, is_in_blocks
from leaderless.planner.graph.schedule import makers
from leaderless.planner.simulate.cluster import WorkloadConfig
from leaderless.planner.workflow.columns import (
    EXPERTS_PER_TOKEN,
    IMAGE_BYTES_PER_TOKEN,
    SUPPORT_PER_TOKEN,
    TEACHER_WORDS_PER_TOKEN,
    Axis,
    column_of,
)

Int = NDArray[np.int64]

ID_BYTES = 8
"""Id of a row, or of its prompt, in memory. Ids are not sent: all ranks know them."""
LENGTH_BYTES = 4
"""A length as it is sent: one for all columns of an axis, and one for each object's text."""
HELD_LENGTH_BYTES = 8
"""A length in memory."""


@dataclass(frozen=True)
class SimulatedRows:
    """Some rows in the order of their ids: [n] the place of each row's prompt, ascending, and the lengths of its parts.

    Samples point to prompts; other rows are prompts. A response has no tokens before it is there.
    """

    groups: Int
    prompt_tokens: Int
    response_tokens: Int
    are_samples: bool

    def __len__(self) -> int:
        return len(self.groups)

    @cached_property
    def tokens(self) -> Int:
        """[n] length of each row, prompt and response."""
        return self.prompt_tokens + self.response_tokens

    def shared_tokens(self, shards: Int) -> Int:
        """[n] tokens that need no computing: a prompt that an earlier row on the same shard has, too."""
        if not self.are_samples or not len(self):
            return np.zeros(len(self), dtype=np.int64)
        return self.prompt_tokens * is_repeated(shards * (int(self.groups[-1]) + 1) + self.groups)

    def costs(self, columns: Iterable[str], shards: Int, quadratic_tokens: int) -> Int:
        """[n] cost of each row in the databuffer's assignment: from the tokens that are sent."""
        chosen, nothing = frozenset(columns), np.zeros(len(self), dtype=np.int64)
        responses = self.response_tokens if "tokens" in chosen else nothing
        if "prompt_tokens" not in chosen:
            return np.maximum(sequence_cost(responses, quadratic_tokens), 1)
        tokens, shared = self.prompt_tokens + responses, self.shared_tokens(shards)
        return np.maximum(sequence_cost(tokens, quadratic_tokens, shared), 1)

    def row_bytes(self, columns: Iterable[str]) -> Int:
        """[n] bytes of the values of rows without their prompts, in memory and as they are sent."""
        return self._bytes(columns, are_of_prompts=False)

    def prompt_bytes(self, columns: Iterable[str]) -> Int:
        """[n] bytes of the values of each row's prompt; 0 where rows are prompts."""
        return self._bytes(columns, are_of_prompts=True)

    def _bytes(self, columns: Iterable[str], *, are_of_prompts: bool) -> Int:
        sizes = np.zeros(len(self), dtype=np.int64)
        for column in map(column_of, columns):
            if (column.is_prompt and self.are_samples) == are_of_prompts:
                sizes += column.item_bytes * (1 if column.axis is None else self.lengths_along(column.axis))
        return sizes

    def num_lengths(self, columns: Iterable[str]) -> tuple[int, int]:
        """Lengths that are sent with a row, and with a prompt that rows point to."""
        ragged: tuple[set[str], set[str]] = (set(), set())
        for name in columns:
            column = column_of(name)
            if column.kind != "dense":
                ragged[column.is_prompt and self.are_samples].add(column.axis or name)
        return len(ragged[0]), len(ragged[1])

    def held_bytes(self, columns: Iterable[str]) -> Int:
        """[n] bytes of rows in memory: the id, the prompt's id, lengths, and the rows' own columns."""
        chosen = tuple(columns)
        return self.row_bytes(chosen) + 2 * ID_BYTES + HELD_LENGTH_BYTES * self.num_lengths(chosen)[0]

    def lengths_along(self, axis: Axis) -> Int:
        """[n] length of each row along an axis."""
        if axis == "image_bytes":
            return self.prompt_tokens * IMAGE_BYTES_PER_TOKEN
        if axis == "later_image_bytes":
            return self.response_tokens * IMAGE_BYTES_PER_TOKEN
        if axis == "experts":
            return self.tokens * EXPERTS_PER_TOKEN
        if axis == "teacher":
            return self.response_tokens * TEACHER_WORDS_PER_TOKEN
        if axis == "support":
            return self.response_tokens * SUPPORT_PER_TOKEN
        return self.prompt_tokens if axis == "prompt_tokens" else self.response_tokens


@dataclass(frozen=True)
class Workload:
    """The sequences of one step: the rows of the data, those behind the first rollout, and those behind each other."""

    prompts: SimulatedRows
    samples: SimulatedRows
    further: tuple[SimulatedRows, ...] = ()


def sample_workload(recipe: Recipe, config: WorkloadConfig, agents: Sequence[str | None] = (None,)) -> Workload:
    """Draw the lengths of a step's sequences, with the roles of its rollouts.

    The recipe's seed decides, and the number of ranks does not matter.
    """
    generator = np.random.default_rng(recipe.seed)
    num_prompts, num_siblings = recipe.batch.prompts_per_step, recipe.batch.responses_per_prompt
    limit = recipe.data.max_prompt_tokens
    prompts = _lengths(generator, num_prompts, config.prompt_median_tokens, config.prompt_sigma, limit)
    groups = np.arange(num_prompts)
    is_given, count = recipe.data.has_responses or bool(recipe.data.preferences), num_prompts * num_siblings
    samples: list[SimulatedRows] = []
    for agent in agents or (None,):
        limit = recipe.data.max_response_tokens if is_given else recipe.as_seen_by(agent).longest_response()
        responses = _lengths(generator, count, config.response_median_share * limit, config.response_sigma, limit)
        own = np.repeat(groups, num_siblings), np.repeat(prompts, num_siblings), responses
        samples.append(SimulatedRows(*own, are_samples=True))
    given = samples[0].response_tokens[::num_siblings] if is_given else np.zeros(num_prompts, dtype=np.int64)
    return Workload(SimulatedRows(groups, prompts, given, are_samples=False), samples[0], tuple(samples[1:]))


def samplers_of(plan: Plan) -> list[PlannedNode]:
    """The nodes that sample responses, in order."""
    return [node for node in plan.nodes if node.spec.samples]


def _lengths(generator: np.random.Generator, count: int, median: float, sigma: float, limit: int) -> Int:
    """[count] lognormal lengths, at least 1 and at most the limit."""
    drawn = median * np.exp(sigma * generator.standard_normal(count))
    return np.clip(np.rint(drawn), 1, limit).astype(np.int64)


@dataclass(frozen=True)
class SimulatedRoutes:
    """Where the rows of one reshard come from and go to: [n] rank that sends each, and target shard that owns it.

    Owners are agreed if an earlier reshard has found them. Spares are the rows that each rank has already from an
    earlier reshard, ascending, by rank.
    """

    rows: SimulatedRows
    holders: Int
    owners: Int
    source: Layout
    target: Layout
    is_agreed: bool
    num_updates: int = 1
    spares: Mapping[int, Int] = field(default_factory=dict)


class RowPlacement:
    """The shard of each row, for every row set and layout that has rows."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self.plan, self.workload = plan, workload
        self._shards: dict[tuple[str, object], Int] = {}
        self._agents = [node.node.role for node in samplers_of(plan)]
        self._known: dict[tuple[int, ...], tuple[SimulatedRows, Int]] = {}

    def rows(self, row_set: str) -> SimulatedRows:
        """The rows of a row set. Filters are taken to keep all of theirs, but for those that select by agent."""
        return self._rows_and_samplers(row_set)[0]

    def _rows_and_samplers(self, row_set: str) -> tuple[SimulatedRows, Int]:
        """The rows of a row set, and [n] place of the node that sampled each."""
        samplers = tuple(sorted(self._samplers(row_set)))
        if samplers not in self._known:
            drawn = [(self.workload.samples, *self.workload.further)[place] for place in samplers]
            rows = (
                joined_rows(drawn) if drawn else (self.workload.prompts, np.zeros(len(self.workload.prompts), np.int64))
            )
            self._known[samplers] = rows[0], np.array(samplers or (0,), dtype=np.int64)[rows[1]]
        return self._known[samplers]

    def _samplers(self, row_set: str) -> set[int]:
        """The places of the nodes that sampled the rows of a row set; none for prompts."""
        found = set[int]()
        for maker in makers(self.plan.nodes, row_set):
            if maker.spec.samples:
                found.add([node.name for node in samplers_of(self.plan)].index(maker.name))
            if maker.spec.rows != "expand":
                agents = dict(maker.node.where).get("agent", self._agents)
                found |= {place for place in self._samplers(maker.row_set) if self._agents[place] in agents}
        return found

    def shards(self, row_set: str, layout: Layout) -> Int:
        """[n] shard of each row."""
        return self._shards[row_set, layout.row_key]

    def load(self, action: Load) -> Int:
        """Divide the prompts, [n] shard of each: shards take contiguous parts of the step, or turns."""
        num_rows, dp = len(self.workload.prompts), action.layout.dp
        firsts = num_rows * np.arange(dp) // dp
        in_parts = np.searchsorted(firsts, np.arange(num_rows), side="right") - 1
        shards = np.arange(num_rows) % dp if action.in_turns else in_parts
        self._shards["data", action.layout.row_key] = shards
        return shards

    def run(self, node: PlannedNode) -> Int:
        """[n] shard of each row of a node's output: a response is where its prompt is."""
        shards, key = self.shards(node.row_set, node.layout), (node.row_set_after, node.layout.row_key)
        (_, before), (rows, after) = map(self._rows_and_samplers, (node.row_set, node.row_set_after))
        if node.spec.rows == "join":
            whole = self._shards.setdefault(key, np.zeros(len(rows), dtype=np.int64))
            whole[np.isin(after, before)] = shards
            return shards
        if node.spec.rows == "expand":
            shards = shards[rows.groups]
        elif node.spec.rows == "extend":  # a new sample is where those of its group are
            by_group = np.zeros(len(self.workload.prompts), dtype=np.int64)
            by_group[self.rows(node.row_set).groups] = shards
            shards = by_group[rows.groups]
        elif node.spec.rows == "filter" and rows.are_samples:
            shards = shards[np.isin(before, after)]
        self._shards[key] = shards
        return shards

    def reshard(self, action: Reshard) -> SimulatedRoutes:
        """Reshard rows; the assignment is the databuffer's own."""
        rows, target = self.rows(action.row_set), action.target_layout
        holders = sending_ranks(self.shards(action.row_set, action.source_layout), action.source_layout)
        key = (action.row_set, target.row_key)
        is_agreed, spares = key in self._shards, self._spares(action)
        if not is_agreed:
            self._shards[key] = owners_of(action, rows, holders, spares)
        shards, num_updates = self._shards[key], action.num_updates
        return SimulatedRoutes(rows, holders, shards, action.source_layout, target, is_agreed, num_updates, spares)

    def _spares(self, action: Reshard) -> dict[int, Int]:
        """For each rank of the target layout, the rows that it has received with the same columns before."""
        spare = action.spare_layout
        if spare is None:
            return {}
        shards = self.shards(action.row_set, spare)
        order = np.argsort(shards, kind="stable")
        of_shard = np.split(order, np.searchsorted(shards[order], np.arange(1, spare.dp)))
        ranks = [rank for rank in spare.ranks if rank in action.target_layout]
        return {rank: of_shard[spare.shard_of(rank)] for rank in ranks if len(of_shard[spare.shard_of(rank)])}


def joined_rows(parts: Sequence[SimulatedRows]) -> tuple[SimulatedRows, Int]:
    """The samples of several nodes in the order of their prompts, and [n] part that each comes from."""
    if len(parts) == 1:
        return parts[0], np.zeros(len(parts[0]), dtype=np.int64)
    groups = np.concatenate([part.groups for part in parts])
    order = np.argsort(groups, kind="stable")
    prompts, responses = (
        np.concatenate(columns)[order]
        for columns in ([part.prompt_tokens for part in parts], [part.response_tokens for part in parts])
    )
    origin = np.repeat(np.arange(len(parts)), [len(part) for part in parts])[order]
    return SimulatedRows(groups[order], prompts, responses, are_samples=True), origin


def owners_of(action: Reshard, rows: SimulatedRows, holders: Int, spares: Mapping[int, Int]) -> Int:
    """[n] shard that gets each row, as all ranks of the reshard compute it."""
    target, last = action.target_layout, action.ranks[-1]
    units = rows.groups if action.keep_groups else np.arange(len(rows))
    before, shards = (_shard_of_rank(layout, last)[holders] for layout in (action.source_layout, target))
    for rank in sorted(spares):
        known = spares[rank]
        shards[known[shards[known] < 0]] = target.shard_of(rank)
    costs = rows.costs(action.columns, before, action.quadratic_tokens)
    groups = np.unique(rows.groups)
    parts = parts_of(rows.groups, at_places(groups, first_places(len(groups), action.num_updates)))
    firsts = np.searchsorted(np.array(action.ranks), np.array(target.ranks)[:: target.ranks_per_shard])
    in_blocks = Shards.of(Mesh(len(action.ranks)), firsts) if is_in_blocks(len(action.ranks)) else None

    def assign_some(chosen: NDArray[np.bool_]) -> Int:
        if in_blocks is None:
            return assign(costs[chosen], units[chosen], shards[chosen], target.dp)
        joined, unit_of_row = BlockUnits.of(units[chosen], costs[chosen], shards[chosen])
        return assign_in_blocks(joined, in_blocks)[unit_of_row]

    return by_part(parts, assign_some)


def _shard_of_rank(layout: Layout, last: int) -> Int:
    """[last + 1] shard of each rank, or -1."""
    shards = np.full(last + 1, -1, dtype=np.int64)
    shards[list(layout.ranks)] = np.arange(len(layout.ranks)) // layout.ranks_per_shard
    return shards


def sending_ranks(shards: Int, layout: Layout) -> Int:
    """[n] rank that sends each row: ranks that hold the same rows each send a part of them, in order."""
    size, ranks = layout.ranks_per_shard, np.array(layout.ranks)
    order = np.argsort(shards, kind="stable")
    counts = np.bincount(shards, minlength=layout.dp)
    place = np.empty(len(shards), dtype=np.int64)
    place[order] = np.arange(len(shards)) - np.repeat(np.cumsum(counts) - counts, counts)
    # A rank's part ends before count * (part + 1) // size.
    part = ((place + 1) * size - 1) // np.maximum(counts[shards], 1)
    senders: Int = ranks[shards * size + part]
    return senders
