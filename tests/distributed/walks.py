"""Random chains of nodes over random layouts, and a walk that checks every row and byte on the way."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.data.batch import SIBLING_BITS, Batch, Column, Jagged, make_sample_ids
from leaderless.data.buffer.databuffer import WINDOWS, Databuffer
from leaderless.data.buffer.wire import DTYPES
from leaderless.distributed.transport import Transport
from leaderless.planner import Layout, Load, Plan, PlannedNode, Reshard, RunNode, Windowed, flat
from leaderless.planner.graph.loops import make_loops
from leaderless.planner.plan_parts import BatchSizes
from leaderless.planner.workflow import Node, StageSpec, Workflow

PROMPT_COLUMNS = ("prompt_tokens", "rows", "image")
SAMPLE_COLUMNS = ("tokens", "group_id", "flags", "scores", "halves", "notes", "patches", "matrix")
UNDECLARED = "undeclared"
OBJECTS: tuple[Json, ...] = (None, "", "naïve 🤖 \ud83d", {"a": [1, {"b": None}], "数": -0.5}, [[], {}], 2**70, True)


@dataclass(frozen=True)
class Kind:
    """The storage of a column, by its name."""

    kind: Literal["dense", "jagged", "object"]
    dtype: str = "int64"
    shape: tuple[int, ...] = ()
    axis: str = ""


KINDS: Mapping[str, Kind] = {
    "prompt_tokens": Kind("jagged", axis="prompt_tokens"),
    "rows": Kind("object"),
    "image": Kind("jagged", "uint8", (2, 3), "pixels"),
    "tokens": Kind("jagged", axis="tokens"),
    "group_id": Kind("dense"),
    "flags": Kind("jagged", "bool", axis="tokens"),
    "scores": Kind("dense", "bfloat16", (2,)),
    "halves": Kind("jagged", "float16", axis="response_tokens"),
    "notes": Kind("object"),
    "patches": Kind("jagged", "float64", (2, 1), "pixels"),
    "matrix": Kind("dense", "float32", (0, 2)),
    UNDECLARED: Kind("dense"),
}


@dataclass(frozen=True)
class Step:
    """A node of a chain.

    Attributes:
        rows: Effect of the node on rows.
        ranks: Ranks it runs on.
        dp: Number of shards.
        reads: Node that provides each column it reads.
        writes: Columns it writes.
        needs_whole_groups: Whether it needs whole groups, as a stage declares it.
        streams: Whether it can run window by window, as a stage declares it.
    """

    rows: Literal["same", "expand", "filter"]
    ranks: tuple[int, ...]
    dp: int
    reads: Mapping[str, str]
    writes: tuple[str, ...]
    needs_whole_groups: bool
    streams: bool = False

    @property
    def layout(self) -> Layout:
        return Layout(self.ranks, self.dp, tp=len(self.ranks) // self.dp)


@dataclass(frozen=True)
class Case:
    """A chain of nodes and the prompts that go through it."""

    world_size: int
    steps: tuple[Step, ...]
    num_prompts: int
    spread: Literal["even", "random", "one"]
    seed: int
    num_windows: int = 1


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains of two to six nodes: some on prompts, one that may make samples, some on samples, filters among both."""
    world_size = draw(st.integers(2, 4))
    expand_at = draw(st.sampled_from([0, 0, 0, 1, 2, None]))
    steps: list[Step] = []
    provided = {column: ["data"] for column in PROMPT_COLUMNS}
    for index in range(draw(st.integers(2, 6))):
        rows = "expand" if index == expand_at else draw(st.sampled_from(["same", "same", "same", "filter"]))
        carried = st.lists(st.sampled_from(sorted(provided)), unique=True, min_size=int(rows != "same"))
        columns = draw(carried) if index else list(provided)
        reads = {column: draw(st.sampled_from(provided[column])) for column in columns}
        writes = tuple(draw(st.lists(st.sampled_from(SAMPLE_COLUMNS), unique=True, max_size=5)))
        ranks = tuple(sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1))))
        dp = draw(st.sampled_from([size for size in range(1, len(ranks) + 1) if len(ranks) % size == 0]))
        streams = draw(st.sampled_from([True, True, True, False]))
        steps.append(Step(rows, ranks, dp, reads, writes, draw(st.booleans()), streams))
        name = f"n{index}"
        if rows != "same":
            provided = {column: [name] for column in reads}
        for column in writes:
            provided.setdefault(column, []).append(name)
            provided[column] = list(dict.fromkeys(provided[column]))
    spread = draw(st.sampled_from(["even", "random", "one"]))
    seed, num_windows = draw(st.integers(0, 2**32)), draw(st.sampled_from([1, 1, 2, 3]))
    return Case(world_size, tuple(steps), draw(st.integers(0, 12)), spread, seed, num_windows)


def plan_of(case: Case) -> Plan:
    """The plan of a chain, its schedule made by the planner."""
    nodes: list[PlannedNode] = []
    row_set = "data"
    for index, step in enumerate(case.steps):
        name = f"n{index}"
        spec = StageSpec("tests:none", rows=step.rows, needs_whole_groups=step.needs_whole_groups, streams=step.streams)
        after = name if step.rows != "same" else row_set
        node = Node(name, "tests:none", after=(f"n{index - 1}",) if index else ())
        nodes.append(PlannedNode(node, spec, step.layout, step.reads, step.writes, row_set, after))
        row_set = after
    recipe = Recipe.model_validate(
        {
            "name": "walk",
            "workflow": "x",
            "models": {},
            "data": {"train": {"path": "x"}},
            "steps": 1,
            "batch": {"windows_per_step": case.num_windows},
        }
    )
    (loop,), channels = make_loops(recipe, nodes, ())
    return Plan(
        recipe_name="walk",
        workflow="walk",
        world_size=case.world_size,
        nodes=tuple(nodes),
        pruned=(),
        edges=(),
        loops=(replace(loop, ranks=tuple(range(case.world_size))),),  # some ranks may have nothing to do
        channels=channels,
        instances=(),
        batch=BatchSizes(1, 1, 1, 1, 1, 1, 1, adapts_to_memory=False),
        sizes={},
        memory=None,
        recipe_hash="",
        engine="native",
        layout={},
        graph=Workflow("walk"),
    )


@dataclass(frozen=True)
class Truth:
    """The content of every row, as a function of its id alone."""

    case: Case

    def random(self, *key: object) -> random.Random:
        return random.Random(f"{self.case.seed} {key}")

    def prompts(self) -> list[int]:
        """Ids of the prompts, with gaps."""
        return sorted(self.random("prompts").sample(range(1000), self.case.num_prompts))

    def shard_of(self, prompt: int, layout: Layout) -> int:
        """The rank that loads a prompt."""
        match self.case.spread:
            case "even":
                return self.prompts().index(prompt) % layout.dp
            case "random":
                return self.random("shard", prompt, layout).randrange(layout.dp)
            case _:
                return self.random("shard", layout).randrange(layout.dp)

    def after(self, name: str, ids: Sequence[int]) -> list[int]:
        """Rows that a node makes of its rows."""
        step = self.case.steps[int(name[1:])]
        if step.rows == "expand":
            return [(row << SIBLING_BITS) + sibling for row in ids for sibling in range(self.siblings(row))]
        if step.rows == "filter":
            return [row for row in ids if self.random("keep", name, row).random() < 0.7]
        return list(ids)

    def siblings(self, prompt: int) -> int:
        return self.random("siblings", prompt).randrange(5)

    def column(self, name: str, writer: str, ids: Iterable[int]) -> Column:
        """A column that a node wrote, for some rows."""
        kind, ids = KINDS[name], list(ids)
        if kind.kind == "object":
            return tuple(self.random(name, writer, row).choice(OBJECTS) for row in ids)
        dtype = DTYPES[kind.dtype]
        lengths = [self.random(kind.axis, row).choice([0, 1, 3]) if kind.axis else 1 for row in ids]
        parts = [
            _bits(self.random(name, writer, row), (length, *kind.shape), dtype)
            for row, length in zip(ids, lengths, strict=True)
        ]
        values = torch.cat([torch.empty((0, *kind.shape), dtype=dtype), *parts])
        return Jagged(values, torch.tensor(lengths, dtype=torch.int64), kind.axis) if kind.axis else values

    def writer(self, name: str, source: str) -> str:
        """The node that wrote what a node reads from `source`, however often it was passed on since."""
        while source != "data":
            step = self.case.steps[int(source[1:])]
            if name in step.writes:
                break
            source = step.reads[name]
        return source


def _bits(generator: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.tensor([generator.random() < 0.5 for _ in range(count)], dtype=dtype).view(shape)
    raw = bytearray(generator.randbytes(count * dtype.itemsize))
    return (torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)


def same_bits(left: Column, right: Column) -> bool:
    """Equal in type, shape and every bit, NaN included."""
    if isinstance(left, Jagged) and isinstance(right, Jagged):
        same_runs = left.axis == right.axis and torch.equal(left.lengths, right.lengths)
        return same_runs and same_bits(left.values, right.values)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same_type = left.dtype == right.dtype and left.shape == right.shape
        return same_type and _raw(left).equal(_raw(right))
    return type(left) is type(right) and left == right


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Walker:
    """One rank during the execution of its chain."""

    def __init__(self, case: Case) -> None:
        self.truth, self.plan = Truth(case), plan_of(case)
        host = self.truth.random("host", dist.get_rank()).choice(["a", "b"])
        self.transport = Transport(torch.device("cpu"), timeout_s=20, host=host)
        for action in flat(self.plan.schedule):
            self.transport.add_process_group(self.plan.ranks_of(action))
            if isinstance(action, Reshard):
                self.transport.add_lane(WINDOWS, action.ranks)
        self.rank = self.transport.rank
        self.buffer = Databuffer(self.plan, self.transport)

    def walk(self) -> dict[str, list[int]]:
        """Execute the chain once; returns the rows that this rank had at each node."""
        seen: dict[str, list[int]] = {}
        for action in self.plan.chain(self.rank):
            match action:
                case Load():
                    self.buffer.load(action, self.loaded(action))
                case RunNode(name):
                    batch = self.buffer.get(name)
                    seen[name] = batch.ids.tolist()
                    self.check(name, batch)
                    self.buffer.put(name, self.output(name, batch))
                case Reshard():
                    self.buffer.reshard(action)
                    self.check_arrived(action)
                case Windowed():
                    self.stream(action, seen)
            self.buffer.release(action)
        held = {key: [*table.columns, *table.prompt_columns] for key, table in self.buffer._tables.items()}
        assert not any(held.values()), f"rank {self.rank} still holds {held}"
        self.buffer.clear()
        return seen

    def stream(self, stream: Windowed, seen: dict[str, list[int]]) -> None:
        """Execute window by window."""
        self.buffer.open_windows(stream)
        for action, window in stream.turns():
            match action:
                case RunNode(name):
                    self.buffer.wait(name, window)
                    batch = self.buffer.get(name, window)
                    seen.setdefault(name, []).extend(batch.ids.tolist())
                    self.check(name, batch)
                    self.buffer.put(name, self.output(name, batch), window)
                case Reshard():
                    self.buffer.reshard_window(action, window, nullcontext())
            self.buffer.release(action, window)
        self.buffer.close_windows()

    def loaded(self, action: Load) -> Batch:
        shard = action.layout.shard_of(self.rank)
        prompts = [row for row in self.truth.prompts() if self.truth.shard_of(row, action.layout) == shard]
        columns = {name: self.truth.column(name, "data", prompts) for name in PROMPT_COLUMNS}
        return self.shuffled(Batch(torch.tensor(prompts, dtype=torch.int64), columns))

    def check(self, name: str, batch: Batch) -> None:
        """Check that rows are in order and have exactly the columns that the node reads, bit for bit."""
        node = self.plan[name]
        where = f"node {name} on rank {self.rank}"
        assert bool((batch.ids[1:] > batch.ids[:-1]).all()), f"{where}: rows out of order"
        assert batch.names() == sorted(node.reads), f"{where}: {batch.names()}"
        samples = batch.prompts is not None
        groups = batch.ids >> SIBLING_BITS if samples else batch.ids
        assert torch.equal(batch.group_ids, groups), f"{where}: groups"
        for column, source in node.reads.items():
            writer = self.truth.writer(column, source)
            is_prompts = samples and self.of_prompt(writer)
            truth = self.truth.column(column, writer, (groups if is_prompts else batch.ids).tolist())
            assert not len(batch) or same_bits(batch[column], truth), f"{where}: column {column} of {source}"
            assert not is_prompts or column not in batch.columns, f"{where}: column {column} is held per sample"

    def of_prompt(self, writer: str) -> bool:
        """Whether a node wrote about prompts, because it came before the samples were made."""
        row_sets = {"data": "data"} | {node.name: node.row_set for node in self.plan.nodes}
        makers = {f"n{i}" for i, step in enumerate(self.truth.case.steps) if step.rows == "expand"}
        row_set = row_sets[writer]
        while row_set != "data":
            if row_set in makers:
                return False
            row_set = row_sets[row_set]
        return writer not in makers

    def check_arrived(self, action: Reshard) -> None:
        """Check that the right rows have arrived, and that prompts are those of the rows on this rank, each once."""
        if self.rank not in action.target_layout:
            return
        table = self.buffer._tables[action.row_set, action.target_layout.ranks, action.target_layout.dp]
        columns = {name for source, name in table.columns if source == action.source}
        if table.prompt_ids is None or table.prompt_index is None:
            assert columns == set(action.columns), f"{columns} arrived by {action}"
            return
        of_prompts = {name for source, name in table.prompt_columns if source == action.source}
        assert columns | of_prompts == set(action.columns), f"{columns} and {of_prompts} arrived by {action}"
        referenced = table.prompt_index.unique().tolist()
        assert referenced == list(range(len(table.prompt_ids))), f"prompts of {action} on rank {self.rank}"
        assert torch.equal(table.prompt_ids, table.prompt_ids.unique())

    def output(self, name: str, batch: Batch) -> Batch:
        """The output of a stage, with an additional column, and its rows in any order."""
        step = self.truth.case.steps[int(name[1:])]
        rows = torch.tensor(self.truth.after(name, batch.ids.tolist()), dtype=torch.int64)
        match step.rows:
            case "expand":
                siblings = torch.tensor([self.truth.siblings(row) for row in batch.ids.tolist()], dtype=torch.int64)
                parents = torch.arange(len(batch)).repeat_interleave(siblings)
                assert torch.equal(rows >> SIBLING_BITS, batch.ids[parents])
                made = Batch(make_sample_ids(batch.ids[parents], rows & ((1 << SIBLING_BITS) - 1)), {}, batch, parents)
            case "filter":
                made = batch.select(torch.isin(batch.ids, rows))
            case _:
                made = Batch(batch.ids, {}, batch.prompts, batch.prompt_index)
        columns = {column: self.written(column, name, made) for column in (*step.writes, UNDECLARED)}
        return self.shuffled(made.with_columns(columns))

    def written(self, column: str, name: str, made: Batch) -> Column:
        values = self.truth.column(column, name, made.ids.tolist())
        if len(made) or not isinstance(values, Tensor):
            return values
        return values.to(torch.float64)  # without rows a stage may not know the type of its values

    def shuffled(self, batch: Batch) -> Batch:
        generator = torch.Generator().manual_seed(self.truth.case.seed % 1000 + self.rank)
        return batch.select(torch.randperm(len(batch), generator=generator))


def walk(case: Case) -> list[dict[str, list[int]]]:
    """Two steps of a chain on one rank; returns the rows that it had at each node of each step."""
    walker = Walker(case)
    return [walker.walk(), walker.walk()]
