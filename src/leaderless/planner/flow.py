"""Columns: which node gets which from which node, and which nodes need not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from leaderless.config import Problem, Recipe, RecipeError, nearest
from leaderless.config.algorithm import RepeatConfig
from leaderless.workflow import COLUMNS, DATA_COLUMNS, DATA_RESPONSE_COLUMNS, Node, Workflow, spec_of
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


class Flow:
    """The columns between the nodes that run, followed from readers back to writers.

    A row set is named by the node that made its rows: `data` for prompts, `rollout` for samples, a filter for what it
    kept. All columns that a node reads come from nodes of its own row set. A node that changes rows therefore carries
    along the columns that later nodes need; the prompts' own columns stay in the prompt table that samples point to.

    Attributes:
        order: The nodes that run, in order.
        pruned: Nodes that do not run because no node reads what they write.
        specs: Contract of each node.
        agents: Roles that sampled the rows of each node.
        settings: Recipe with the settings that hold for each node.
        writes: Columns that each node writes.
        row_set: Row set that each node works on.
        sources: Node that each column of a node comes from, carried columns included, by node and column.
    """

    def __init__(self, recipe: Recipe, workflow: Workflow) -> None:
        """Resolve which columns go where.

        Raises:
            RecipeError: A contract is broken: unknown stage, column that no node before writes, writers or row changes
                without an order, settings that a stage refuses, a best metric that nothing reports, repeated nodes
                whose groups cannot be counted.
        """
        nodes = workflow.order()
        self.recipe, self.workflow, self._before = recipe, workflow, workflow.ancestors()
        self.specs = {node.name: spec_of(node) for node in nodes}
        self.agents = {node.name: self._agents_of(node, nodes) for node in nodes}
        self.settings = {
            node.name: self.specs[node.name].settings_of(recipe, node, self.agents[node.name]) for node in nodes
        }
        self._check_settings(nodes)
        self._check_repeated()
        self.writes = {
            node.name: self.specs[node.name].writes_of(self.settings[node.name], node, workflow) for node in nodes
        }
        self._writers = self._ordered_writers()
        self.row_set = {node.name: self._row_set_of(node, nodes) for node in nodes}
        self.sources: dict[str, dict[str, str]] = {}
        self._needed: set[str] = set()
        self.order = tuple(node for node in reversed(nodes) if self._visit(node))[::-1]
        self.pruned = tuple(node.name for node in nodes if node not in self.order)
        if workflow.repeated and workflow.repeated[-1] in self.pruned:
            raise RecipeError.at(
                "repeat", f"no node that runs comes after '{workflow.repeated[-1]}', so it would fill no step"
            )
        if not self.order:
            raise RecipeError.at(
                "nodes",
                "no node trains a role or has another effect, so that nobody reads what they write: add an update",
            )
        for node in self.order:
            self._trace_written(node)
            self._check_old_log_probs(node)
        check_best_metric(recipe, self.order, workflow, self.agents)
        self.sources = {name: dict(sorted(sources.items())) for name, sources in self.sources.items()}

    def row_set_after(self, name: str) -> str:
        """Row set of the output of a node, or of the data."""
        return name if name == DATA or self.specs[name].rows != "same" else self.row_set[name]

    def _check_settings(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            spec = self.specs[node.name]
            if spec.check is not None:
                try:
                    spec.check(self.settings[node.name], node)
                except RecipeError as error:
                    raise self._for_role(error, node) from error
            if spec.role_use != "none" and node.role is None:
                raise RecipeError.at(f"nodes.{node.name}.role", f"stage '{node.run}' needs a role, as role: policy")

    def _for_role(self, error: RecipeError, node: Node) -> RecipeError:
        """The error of a check, with the keys of settings that the role of a node has for itself."""
        owners = {str(s): role for s, role in self.recipe.sections_of(node.role, self.agents[node.name]).items()}
        return RecipeError(
            [
                replace(problem, key=f"roles.{owners[section]}.{problem.key}") if section in owners else problem
                for problem in error.problems
                for section in [problem.key.partition(".")[0]]
            ]
        )

    def _agents_of(self, node: Node, nodes: Sequence[Node]) -> tuple[str, ...]:
        """The roles that sampled the rows of a node."""
        sampling = [other for other in nodes if other.name in self._before[node.name]]
        return tuple(other.role for other in sampling if other.role and self.specs[other.name].rows == "expand")

    def _check_repeated(self) -> None:
        """Repeated nodes output whole groups, chosen by the last of them and all sampled with the same weights."""
        recipe, workflow = self.recipe, self.workflow
        if not workflow.repeated:
            if recipe.algorithm.repeat != RepeatConfig():
                raise RecipeError.at(
                    "algorithm.repeat", f"does nothing: the workflow '{workflow.name}' repeats no nodes"
                )
            return
        if recipe.batch.windows_per_step > 1:
            raise RecipeError.at(
                "batch.windows_per_step",
                f"is {recipe.batch.windows_per_step}, but the workflow '{workflow.name}' repeats nodes, and their "
                "rounds divide a step already: leave it at 1",
            )
        last = workflow[workflow.repeated[-1]]
        if self.specs[last.name].rows != "filter" or not self.specs[last.name].needs_whole_groups:
            raise RecipeError.at(
                f"nodes.{last.name}.run",
                f"stage '{last.run}' ends what is repeated, so it must keep some of its groups and drop the others "
                "(rows: filter, with whole groups), as dynamic_sampling does",
            )
        for name in workflow.repeated:
            if self.specs[name].role_use == "train":
                raise RecipeError.at(
                    "repeat",
                    f"node '{name}' trains a role, and the samples of all rounds must come from the same weights: put "
                    f"it after '{last.name}', outside of `repeat`",
                )

    def _precedes(self, first: str, second: str) -> bool:
        """Whether one node, or the data, always runs before another."""
        return first == DATA or (second != DATA and first in self._before[second])

    def _writers_before(self, column: str, name: str) -> list[str]:
        """The nodes before a node that write a column, in order."""
        return [writer for writer in self._writers.get(column, []) if self._precedes(writer, name)]

    def _ordered_writers(self) -> dict[str, list[str]]:
        """The nodes that write each column, in order; two without an order are refused."""
        provided = DATA_COLUMNS + (DATA_RESPONSE_COLUMNS if self.recipe.data.has_responses else ())
        found = {column: [DATA] for column in provided}
        for name, columns in self.writes.items():
            for column in columns:
                found.setdefault(column, []).append(name)
        for column, writers in found.items():
            for first, second in pairwise(writers):
                if not self._precedes(first, second):
                    raise RecipeError.at(
                        f"nodes.{second}.after",
                        f"nodes '{first}' and '{second}' both write '{column}', and neither comes after the other: "
                        f"add one to the other's `after`",
                    )
        return found

    def _row_set_of(self, node: Node, nodes: Sequence[Node]) -> str:
        """The node that made the rows that a node works on: the last before it that changes rows."""
        before = [other.name for other in nodes if other.name in self._before[node.name]]
        changers = [name for name in before if self.specs[name].rows != "same"]
        for first, second in pairwise(changers):
            if not self._precedes(first, second):
                raise RecipeError.at(
                    f"nodes.{node.name}.after",
                    f"'{first}' and '{second}' both change rows and neither comes after the other, so node "
                    f"'{node.name}' would get two sets of rows: put them one after the other",
                )
        expanders = [name for name in changers if self.specs[name].rows == "expand"]
        if expanders and self.specs[node.name].rows == "expand":  # the samples of a sample would have no ids
            raise RecipeError.at(
                f"nodes.{node.name}.after",
                f"stage '{node.run}' makes samples of prompts, but the rows behind node '{expanders[-1]}' are samples "
                "already: leave one of the two nodes out",
            )
        return changers[-1] if changers else DATA

    def _visit(self, node: Node) -> bool:
        """Trace what a node reads, if the node is needed at all."""
        spec = self.specs[node.name]
        if node.name not in self._needed and not spec.is_effective(self.settings[node.name]):
            return False
        row_set = self.row_set[node.name]
        self._needed.add(row_set)
        self.sources.setdefault(node.name, {})
        is_carried = bool(self.recipe.channels or self.workflow.repeated) and node.name not in self.workflow.repeated
        made = [column for column in spec.reads_if_made if self._writers_before(column, node.name)]
        always = spec.reads_of(self.settings[node.name], node)
        for column in (*always, *(spec.reads_if_carried if is_carried else ()), *made):
            self._trace(node.name, column, row_set)
        return True

    def _trace_written(self, node: Node) -> None:
        """Let a node read what is written on its rows, or carried to them, for the sake of other nodes."""
        row_set = self.row_set[node.name]
        for column in self.specs[node.name].reads_if_written:
            writers = self._writers_before(column, node.name)
            is_carried = column in self.sources.get(row_set, {})
            if writers and writers[-1] in self._needed and (self.row_set_after(writers[-1]) == row_set or is_carried):
                self._trace(node.name, column, row_set)

    def _trace(self, reader: str, column: str, row_set: str) -> None:
        """Find where a reader gets a column, through every node that changes rows on the way."""
        before = self._writers_before(column, reader)
        if not before:
            raise RecipeError([self._missing(reader, column)])
        writer, sources = before[-1], self.sources.setdefault(reader, {})
        if self.row_set_after(writer) == row_set:
            sources[column] = writer
            self._needed.add(writer)
            return
        if not self._precedes(writer, row_set):
            raise RecipeError.at(
                f"nodes.{row_set}.after",
                f"node '{reader}' reads '{column}' of '{writer}' on rows made by '{row_set}': "
                f"'{row_set}' must come after '{writer}' to carry the column along",
            )
        sources[column] = row_set
        self._trace(row_set, column, self.row_set[row_set])

    def _check_old_log_probs(self, trainer: Node) -> None:
        """A role is updated against its own log-probabilities, not against those of another role."""
        writer = self.sources[trainer.name].get(OLD_LOG_PROBS, DATA)
        if self.specs[trainer.name].role_use != "train" or writer == DATA:
            return
        while OLD_LOG_PROBS not in self.writes[writer]:
            writer = self.sources[writer][OLD_LOG_PROBS]
        owner = self.workflow[writer].role
        if owner not in {None, trainer.role}:
            raise RecipeError.at(
                f"nodes.{trainer.name}.after",
                f"node '{trainer.name}' trains role '{trainer.role}', but would read {OLD_LOG_PROBS} of role "
                f"'{owner}' from node '{writer}': put a node {{run: log_probs, role: {trainer.role}}} behind "
                f"'{writer}' and before '{trainer.name}'",
            )

    def _missing(self, name: str, column: str) -> Problem:
        """Why a reader does not find a column before it."""
        writers = self._writers.get(column, [])
        if writers:
            hint = f"'{writers[0]}' writes it but does not come before: add it to `after`"
        elif column in DATA_RESPONSE_COLUMNS:
            hint = "a rollout writes it, or the data when data.train.response is set"
        elif column in HINTS:
            hint = HINTS[column]
        else:
            hint = f"no node writes it{nearest(column, {*self._writers, *COLUMNS} - {column})}"
        return Problem(f"nodes.{name}", f"reads column '{column}', which no node before it writes: {hint}")
