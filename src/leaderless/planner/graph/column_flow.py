"""Columns: which node gets which from which node, and which nodes need not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from leaderless.algorithms.settings import RepeatConfig
from leaderless.config import Problem, Recipe, RecipeError, nearest
from leaderless.planner.graph.row_sets import DATA, RowSets
from leaderless.planner.workflow import (
    COLUMNS,
    DATA_COLUMNS,
    DATA_PREFERENCE_COLUMNS,
    DATA_RESPONSE_COLUMNS,
    EPISODE_IDS,
    IMAGES,
    IS_GREEDY,
    Node,
    Workflow,
    scored_agent,
)
from leaderless.planner.workflow.metrics import check_best_metric
from leaderless.planner.workflow.stage_spec import may_be_stale, names_for

HINTS = {
    "values": "a critic does: use the workflow ppo, add a node that runs the stage 'values', or set an "
    "algorithm.advantage.type that reads none",
    "returns": "the stage 'advantage' does, with algorithm.advantage.type=gae or chained_gae: set it, or use a "
    "workflow without a critic, as grpo",
}
"""Writers of columns that only some settings produce."""
OLD_LOG_PROBS, REF_LOG_PROBS = "old_log_probs", "ref_log_probs"


class ColumnFlow:
    """The columns between the nodes that run, followed from readers back to writers.

    A row set is named by the node that made its rows: `data` for prompts, `rollout` for samples, a filter for what it
    kept. All columns that a node reads come from nodes of its own row set. A node that changes rows therefore carries
    along the columns that later nodes need; the prompts' own columns stay in the prompt table that samples point to.

    Attributes:
        order: The nodes that run, in order.
        pruned: Nodes that do not run because no node reads what they write.
        specs: Contract of each node.
        settings: Recipe with the settings that hold for each node.
        writes: Columns that each node writes.
        row_set: Row set that each node works on.
        sources: Node that each column of a node comes from, carried columns included, by node and column.
    """

    def __init__(self, recipe: Recipe, workflow: Workflow) -> None:
        self._rows = RowSets(workflow)
        self.workflow = workflow = self._rows.workflow
        nodes = workflow.order()
        self.recipe, self._before = recipe, workflow.ancestors()
        self.specs = {name: spec.under(recipe) for name, spec in self._rows.specs.items()}
        self.settings = {node.name: self.specs[node.name].settings_of(recipe, node) for node in nodes}
        self._check_settings(nodes)
        self._check_repeated()
        self.writes = {
            node.name: self.specs[node.name].writes_of(self.settings[node.name], node, workflow) for node in nodes
        }
        self._writers = self._ordered_writers()
        self.row_set = self._rows.of
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
            self._check_scored(node)
            self._check_old_log_probs(node)
            self._check_agents(node)
            self._check_continued(node)
        check_best_metric(recipe, self.order, workflow)
        self.sources = {name: dict(sorted(sources.items())) for name, sources in self.sources.items()}

    def row_set_after(self, name: str) -> str:
        """Row set of the output of a node, or of the data."""
        return self._rows.after[name]

    def _check_settings(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            spec = self.specs[node.name]
            if spec.check is not None:
                try:
                    spec.check(self.settings[node.name], node)
                except RecipeError as error:
                    # Settings that the role of a node has for itself have keys of their own.
                    keys = [self.recipe.key_of(one.key, node.role, node.agents) for one in error.problems]
                    found = [replace(one, key=key) for one, key in zip(error.problems, keys, strict=True)]
                    raise RecipeError(found) from error
            self._check_sampling(node)

    def _check_sampling(self, node: Node) -> None:
        """Samples of several roles must have been generated with the same of those settings that a stage assumes."""
        for name in names_for(self.settings[node.name], node, self.specs[node.name].sampled_with):
            values = {agent: getattr(self.recipe.as_seen_by(agent).rollout, name) for agent in node.agents}
            other = next((agent for agent in values if values[agent] != values[node.agents[0]]), None)
            if other is not None:
                raise RecipeError.at(
                    f"roles.{other}.rollout.{name}",
                    f"is {values[other]!r} and that of role '{node.agents[0]}' is {values[node.agents[0]]!r}, but node "
                    f"'{node.name}' works on samples of both: make them equal, or select rows with `where`",
                )

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

    def _ordered_writers(self) -> dict[str, list[str]]:
        """The nodes that write each column, in order; two without an order are refused."""
        data = self.recipe.data
        responses, images = (*DATA_RESPONSE_COLUMNS,) * data.has_responses, (IMAGES,) * data.has_images
        preferences = (*DATA_PREFERENCE_COLUMNS,) * (data.preferences is not None)
        found = {column: [DATA] for column in (*DATA_COLUMNS, *responses, *images, *preferences)}
        for name, columns in self.writes.items():
            for column in columns:
                found.setdefault(column, []).append(name)
        for column, writers in found.items():
            for first, second in combinations(writers, 2):
                mine, others = self.row_set_after(first), self.row_set_after(second)
                share_rows = mine in self._rows.lineage(others) or others in self._rows.lineage(mine)
                if not self._precedes(first, second) and share_rows:
                    raise RecipeError.at(
                        f"nodes.{second}.after",
                        f"nodes '{first}' and '{second}' both write '{column}', and neither comes after the other: "
                        f"add one to the other's `after`",
                    )
        return found

    def _visit(self, node: Node) -> bool:
        """Trace what a node reads, if the node is needed at all."""
        spec, settings = self.specs[node.name], self.settings[node.name]
        if node.name not in self._needed and not spec.is_effective(settings):
            return False
        row_set = self.row_set[node.name]
        self._needed.update(self._rows.makers(row_set))
        self.sources.setdefault(node.name, {})
        is_carried = may_be_stale(self.recipe, node) and node.name not in self.workflow.repeated
        # A stage that says which rewards are valid is asked how many episodes have failed.
        counted = (EPISODE_IDS,) if "reward_valid" in self.writes[node.name] else ()
        optional = dict.fromkeys((*names_for(settings, node, spec.reads_if_made), *counted))
        made = [column for column in optional if self._writers_before(node.name, column, row_set)]
        carried = names_for(settings, node, spec.reads_if_carried) if is_carried else ()
        for column in (*spec.reads_of(settings, node), *carried, *made):
            self._trace(node.name, column, row_set)
        return True

    def _trace_written(self, node: Node) -> None:
        """Let a node read what is written on its rows, or carried to them, for the sake of other nodes."""
        row_set = self.row_set[node.name]
        for column in self.specs[node.name].reads_if_written:
            writers = self._writers_before(node.name, column, row_set)
            is_carried = column in self.sources.get(row_set, {})
            if writers and writers[-1] in self._needed and (self.row_set_after(writers[-1]) == row_set or is_carried):
                self._trace(node.name, column, row_set)

    def _trace(self, reader: str, column: str, row_set: str) -> None:
        """Find where a reader gets a column, through every node that changes rows on the way."""
        before = self._writers_before(reader, column, row_set)
        if not before:
            raise RecipeError([self._missing(reader, column)])
        writer, sources = before[-1], self.sources.setdefault(reader, {})
        if self.row_set_after(writer) == row_set:
            sources[column] = writer
            self._needed.add(writer)
            return
        makers = self._rows.makers(row_set)
        for maker in makers:
            mine = self._writers_before(reader, column, self.row_set[maker])
            if not mine:
                raise self._one_sided(reader, column, writer, self.row_set[maker])
            if not self._precedes(mine[-1], maker):
                raise RecipeError.at(
                    f"nodes.{self._rows.asked_by.get(maker, maker)}.after",
                    f"node '{reader}' reads '{column}' of '{mine[-1]}' on rows made by '{maker}': "
                    f"'{maker}' must come after '{mine[-1]}' to carry the column along",
                )
        sources[column] = row_set
        for maker in makers:
            self._trace(maker, column, self.row_set[maker])

    def _writers_before(self, reader: str, column: str, row_set: str) -> list[str]:
        """The nodes before a reader that write a column about its rows, or about rows that these were made from."""
        lineage = self._rows.lineage(row_set)
        writers = [writer for writer in self._writers.get(column, []) if self._precedes(writer, reader)]
        return [writer for writer in writers if self.row_set_after(writer) in lineage]

    def _one_sided(self, reader: str, column: str, writer: str, without: str) -> RecipeError:
        """Why rows cannot be joined: some of them have no such column."""
        return RecipeError.at(
            f"nodes.{self._rows.asked_by.get(reader, reader)}.after",
            f"node '{self._rows.asked_by.get(reader, reader)}' reads '{column}' on joined rows, but only those of "
            f"'{writer}' have it: let a node write it about the rows of '{without}' too, or select rows with `where`",
        )

    def _check_scored(self, reader: Node) -> None:
        """Where each node scores the tokens of one role, the tokens of all roles that a reader uses are scored."""
        spec = self.specs[reader.name]
        settings = self.settings[reader.name]
        used = {*spec.reads_of(settings, reader), *names_for(settings, reader, spec.reads_if_carried)}
        used |= {*spec.reads_if_written}
        for column in (OLD_LOG_PROBS, REF_LOG_PROBS):
            if column not in used or column not in self.sources[reader.name]:
                continue  # a node that only hands rows on need not have all scores
            for agent in [reader.role] if spec.takes_own_rows and reader.role else reader.agents:
                if not any(self._origins(reader.name, column, {agent})):
                    role = agent if column == OLD_LOG_PROBS else f"{agent}_reference"
                    raise RecipeError.at(
                        f"nodes.{reader.name}.after",
                        f"node '{reader.name}' reads '{column}' of tokens that role '{agent}' has sampled, which no "
                        f"node before it scores: add one before it with {{run: own_log_probs, role: {role}}}",
                    )

    def _check_old_log_probs(self, trainer: Node) -> None:
        """A role is updated against its own log-probabilities, not against another role's."""
        writer = self.sources[trainer.name].get(OLD_LOG_PROBS, DATA)
        if not self._trains_policy(trainer) or writer == DATA:
            return
        for origin in self._origins(trainer.name, OLD_LOG_PROBS, {*trainer.agents}):
            owner = self.workflow[origin].role
            if owner not in {None, trainer.role}:
                raise RecipeError.at(
                    f"nodes.{trainer.name}.after",
                    f"node '{trainer.name}' trains role '{trainer.role}', but would read {OLD_LOG_PROBS} of role "
                    f"'{owner}' from node '{origin}': put a node {{run: log_probs, role: {trainer.role}}} behind "
                    f"'{origin}' and before '{trainer.name}'",
                )

    def _trains_policy(self, node: Node) -> bool:
        """Whether the main role of a node is a language model that it trains."""
        spec = self.specs[node.name]
        return spec.role_use == "train" and not spec.is_critic(node, node.role)

    def _origins(self, reader: str, column: str, agents: set[str]) -> Iterator[str]:
        """The nodes that have written what a reader gets in a column, for rows of some agents."""
        writer = self.sources[reader].get(column)
        if writer is None:
            return
        is_writer = writer == DATA or column in self.writes[writer]
        spec = self.specs.get(writer)
        # It scores the rows that one role has sampled, and keeps the scores of the others.
        if is_writer and spec is not None and spec.takes_own_rows and spec.role_use == "score":
            mine = scored_agent(self.workflow[writer])
            if mine in agents:
                yield writer
            if others := agents - {mine}:
                yield from self._origins(writer, column, others)
            return
        if is_writer:
            yield writer
            return
        for maker in self._rows.makers(writer):
            if not agents or agents & {*self.workflow[maker].agents}:
                yield from self._origins(maker, column, agents)

    def _check_agents(self, node: Node) -> None:
        """A role does not learn from the samples of several: not all are of the policy that the loss assumes."""
        is_own = self._trains_policy(node) and "policy_versions" in self.sources[node.name]
        if is_own and len(node.agents) > 1 and not self.specs[node.name].takes_own_rows:
            raise RecipeError.at(
                f"nodes.{node.name}.after",
                f"node '{node.name}' trains role '{node.role}' on samples of the roles {', '.join(node.agents)}: "
                f"select those of one with where: {{agent: {node.role}}}",
            )

    def _check_continued(self, node: Node) -> None:
        """Roles continue only what was sampled: it is not said which of them would decode greedily."""
        greedy = self._writers_before(node.name, IS_GREEDY, self.row_set[node.name])
        if self.specs[node.name].rows == "extend" and greedy:
            raise RecipeError.at(
                f"nodes.{greedy[-1]}.run",
                f"node '{greedy[-1]}' also decodes greedily, and node '{node.name}' cannot continue such episodes: run "
                "'rollout', with an advantage that needs no greedy baseline",
            )

    def _missing(self, name: str, column: str) -> Problem:
        """Why a reader does not find a column before it."""
        writers = self._writers.get(column, [])
        if any(self._precedes(writer, name) for writer in writers):
            hint = f"'{writers[0]}' writes it about other rows"
        elif writers:
            hint = f"'{writers[0]}' writes it but does not come before: add it to `after`"
        elif column in DATA_RESPONSE_COLUMNS:
            hint = "a rollout writes it, or the data when data.train.response is set"
        elif column in DATA_PREFERENCE_COLUMNS:
            hint = "the data have it when data.train.chosen and data.train.rejected are set"
        elif column in HINTS:
            hint = HINTS[column]
        else:
            hint = f"no node writes it{nearest(column, {*self._writers, *COLUMNS} - {column})}"
        asking = self._rows.asked_by.get(name)
        key = f"nodes.{asking}.where.{column}" if asking else f"nodes.{name}"
        return Problem(key, f"reads column '{column}', which no node before it writes: {hint}")
