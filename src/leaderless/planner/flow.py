"""Columns: which node gets which from which node, and which nodes need not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from leaderless.config import Problem, Recipe, RecipeError, nearest
from leaderless.config.algorithm import LoopConfig
from leaderless.workflow import (
    COLUMNS,
    DATA_COLUMNS,
    DATA_RESPONSE_COLUMNS,
    Node,
    StageSpec,
    Workflow,
    spec_of,
)
from leaderless.workflow.metrics import check_best_metric

DATA = "data"
"""The source of the columns that the dataloader provides."""
HINTS = {
    "values": "a critic does: use the workflow ppo, add a node that runs the stage 'values', or set another "
    "algorithm.advantage.type than gae",
    "returns": "the stage 'advantage' does, with algorithm.advantage.type=gae: set it, or use a workflow without a "
    "critic, as grpo",
}
"""Writers of columns that only some settings produce."""

OLD_LOG_PROBS = "old_log_probs"


@dataclass(frozen=True)
class Flow:
    """The columns between the nodes that run.

    A row set is named by the node that made its rows: `data` for prompts, `rollout` for samples, a filter for what it
    kept. All columns that a node reads come from nodes of its own row set. A node that changes rows therefore carries
    along the columns that later nodes need; the prompts' own columns stay in the prompt table that samples point to.

    Attributes:
        order: The nodes that run, in order.
        pruned: Nodes that do not run because nobody reads what they write.
        specs: Contract of each node.
        row_set: Row set that each node works on.
        sources: Node that each column of a node comes from, carried columns included, by node and column.
    """

    order: tuple[Node, ...]
    pruned: tuple[str, ...]
    specs: Mapping[str, StageSpec]
    row_set: Mapping[str, str]
    sources: Mapping[str, Mapping[str, str]]

    def row_set_after(self, name: str) -> str:
        """Row set of what a node, or the data, puts out."""
        return name if name == DATA or self.specs[name].rows != "same" else self.row_set[name]


def make_flow(recipe: Recipe, workflow: Workflow) -> Flow:
    """Resolve which columns go where.

    Args:
        recipe: Recipe, which decides what configurable stages read, write and need.
        workflow: The graph.

    Raises:
        RecipeError: A contract is broken: unknown stage, column that nobody before writes, writers or row changes
            without an order, settings that a stage refuses, a best metric that nothing reports, a loop whose groups
            cannot be counted.
    """
    order = workflow.order()
    specs = {node.name: spec_of(node) for node in order}
    for node in order:
        check = specs[node.name].check
        if check is not None:
            check(recipe, node)
        if specs[node.name].role_use != "none" and node.role is None:
            raise RecipeError.at(f"nodes.{node.name}.role", f"stage '{node.run}' needs a role, as role: policy")
    _check_loop(recipe, workflow, specs)
    tracer = _Tracer(recipe, workflow, order, specs)
    tracer.check_writers()
    for node in order:
        tracer.row_set(node.name)
        tracer.check_expansion(node)
    kept = [node for node in reversed(order) if tracer.visit(node)][::-1]
    if workflow.loop and workflow[workflow.loop[-1]] not in kept:
        raise RecipeError.at("loop", f"no node that runs comes after '{workflow.loop[-1]}', so it would fill no step")
    if not kept:
        raise RecipeError.at(
            "nodes", "no node trains a role or has another effect, so that nobody reads what they write: add an update"
        )
    for node in kept:
        tracer.trace_written(node)
        tracer.check_old_log_probs(node)
    check_best_metric(recipe, kept, workflow)
    return Flow(
        order=tuple(kept),
        pruned=tuple(node.name for node in order if node not in kept),
        specs={node.name: specs[node.name] for node in kept},
        row_set={node.name: tracer.row_set(node.name) for node in kept},
        sources={node.name: dict(sorted(tracer.sources[node.name].items())) for node in kept},
    )


def _check_loop(recipe: Recipe, workflow: Workflow, specs: Mapping[str, StageSpec]) -> None:
    """A loop puts out whole groups, chosen by its last node and all sampled with the same weights."""
    if not workflow.loop:
        if recipe.algorithm.loop != LoopConfig():
            raise RecipeError.at("algorithm.loop", f"does nothing: the workflow '{workflow.name}' has no loop")
        return
    if recipe.batch.windows_per_step > 1:
        raise RecipeError.at(
            "batch.windows_per_step",
            f"is {recipe.batch.windows_per_step}, but the workflow '{workflow.name}' has a loop, whose rounds divide a "
            "step already: leave it at 1",
        )
    last = workflow[workflow.loop[-1]]
    if specs[last.name].rows != "filter" or not specs[last.name].needs_whole_groups:
        raise RecipeError.at(
            f"nodes.{last.name}.run",
            f"stage '{last.run}' ends a loop, so it must keep some of its groups and drop the others "
            "(rows: filter, with whole groups), as dynamic_sampling does",
        )
    for name in workflow.loop:
        if specs[name].role_use == "train":
            raise RecipeError.at(
                "loop",
                f"node '{name}' trains a role, and the samples of all rounds must come from the same weights: put it "
                f"after '{last.name}', outside the loop",
            )


@dataclass
class _Tracer:
    """Follows columns from readers back to writers, last node first."""

    recipe: Recipe
    workflow: Workflow
    order: tuple[Node, ...]
    specs: Mapping[str, StageSpec]
    sources: dict[str, dict[str, str]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.before = self.workflow.ancestors()
        self.position = {node.name: index for index, node in enumerate(self.order)}
        provided = DATA_COLUMNS + (DATA_RESPONSE_COLUMNS if self.recipe.data.has_responses else ())
        self.writers: dict[str, list[str]] = {column: [DATA] for column in provided}
        for node in self.order:
            for column in self.specs[node.name].writes_of(self.recipe, node, self.workflow):
                self.writers.setdefault(column, []).append(node.name)

    def precedes(self, first: str, second: str) -> bool:
        """Whether one node, or the data, always runs before another."""
        return first == DATA or (second != DATA and first in self.before[second])

    def check_writers(self) -> None:
        """Two nodes that write the same column must have an order."""
        for column, writers in self.writers.items():
            for first, second in pairwise(writers):
                if not self.precedes(first, second):
                    raise RecipeError.at(
                        f"nodes.{second}.after",
                        f"nodes '{first}' and '{second}' both write '{column}', and neither comes after the other: "
                        f"add one to the other's `after`",
                    )

    def row_set(self, name: str) -> str:
        """The node that made the rows a node works on: the last before it that changes rows.

        Raises:
            RecipeError: Two nodes before it change rows, and neither comes after the other.
        """
        changers = [
            node.name for node in self.order if node.name in self.before[name] and self.specs[node.name].rows != "same"
        ]
        for first, second in pairwise(changers):
            if not self.precedes(first, second):
                raise RecipeError.at(
                    f"nodes.{name}.after",
                    f"'{first}' and '{second}' both change rows and neither comes after the other, so node '{name}' "
                    "would get two sets of rows: put them one after the other",
                )
        return changers[-1] if changers else DATA

    def check_expansion(self, node: Node) -> None:
        """Samples are made of prompts, once: the samples of a sample would have no ids."""
        if self.specs[node.name].rows != "expand":
            return
        ancestors = [other.name for other in self.order if other.name in self.before[node.name]]
        before = [name for name in ancestors if self.specs[name].rows == "expand"]
        if before:
            raise RecipeError.at(
                f"nodes.{node.name}.after",
                f"stage '{node.run}' makes samples of prompts, but the rows behind node '{before[-1]}' are samples "
                "already: leave one of the two nodes out",
            )

    def visit(self, node: Node) -> bool:
        """Trace what a node reads, if the node is needed at all."""
        spec = self.specs[node.name]
        if node.name not in self.needed and not spec.is_effective(self.recipe):
            return False
        row_set = self.row_set(node.name)
        self.needed.add(row_set)
        is_carried = bool(self.workflow.loop) and node.name not in self.workflow.loop
        for column in (*spec.reads_of(self.recipe, node), *(spec.reads_if_carried if is_carried else ())):
            self.trace(node, column, row_set)
        self.sources.setdefault(node.name, {})
        return True

    def trace_written(self, node: Node) -> None:
        """Let a node read what is written on its rows, or carried to them, for the sake of other nodes."""
        row_set = self.row_set(node.name)
        for column in self.specs[node.name].reads_if_written:
            writers = [writer for writer in self.writers.get(column, []) if self.precedes(writer, node.name)]
            is_carried = column in self.sources.get(row_set, {})
            if writers and writers[-1] in self.needed and (self.row_set_after(writers[-1]) == row_set or is_carried):
                self.trace(node, column, row_set)

    def trace(self, reader: Node, column: str, row_set: str) -> None:
        """Find where a reader gets a column, through every node that changes rows on the way."""
        name = reader.name
        before = [writer for writer in self.writers.get(column, []) if self.precedes(writer, name)]
        if not before:
            raise RecipeError([self._missing(name, column)])
        writer = before[-1]
        if self.row_set_after(writer) == row_set:
            self.sources.setdefault(name, {})[column] = writer
            self.needed.add(writer)
            return
        if not self.precedes(writer, row_set):
            raise RecipeError.at(
                f"nodes.{row_set}.after",
                f"node '{name}' reads '{column}' of '{writer}' on rows made by '{row_set}': "
                f"'{row_set}' must come after '{writer}' to carry the column along",
            )
        self.sources.setdefault(name, {})[column] = row_set
        carrier = self.workflow[row_set]
        self.trace(carrier, column, self.row_set(row_set))

    def check_old_log_probs(self, trainer: Node) -> None:
        """A role is updated against its own log-probabilities, not against those of another one."""
        writer = self.sources[trainer.name].get(OLD_LOG_PROBS, DATA)
        if self.specs[trainer.name].role_use != "train" or writer == DATA:
            return
        while OLD_LOG_PROBS not in self.specs[writer].writes_of(self.recipe, self.workflow[writer], self.workflow):
            writer = self.sources[writer][OLD_LOG_PROBS]
        owner = self.workflow[writer].role
        if owner not in {None, trainer.role}:
            raise RecipeError.at(
                f"nodes.{trainer.name}.after",
                f"node '{trainer.name}' trains role '{trainer.role}', but would read {OLD_LOG_PROBS} of role "
                f"'{owner}' from node '{writer}': put a node {{run: log_probs, role: {trainer.role}}} behind "
                f"'{writer}' and before '{trainer.name}'",
            )

    def row_set_after(self, name: str) -> str:
        """Row set of what a node, or the data, puts out."""
        return name if name == DATA or self.specs[name].rows != "same" else self.row_set(name)

    def _missing(self, name: str, column: str) -> Problem:
        """Why a reader does not find a column before it."""
        writers = self.writers.get(column, [])
        if writers:
            hint = f"'{writers[0]}' writes it but does not come before: add it to `after`"
        elif column in DATA_RESPONSE_COLUMNS:
            hint = "a rollout writes it, or the data when data.train.response is set"
        elif column in HINTS:
            hint = HINTS[column]
        else:
            hint = f"no node writes it{nearest(column, {*self.writers, *COLUMNS} - {column})}"
        return Problem(f"nodes.{name}", f"reads column '{column}', which no node before it writes: {hint}")
