"""The rows that each node of a workflow works on; nodes that join and select rows are added where they are needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from leaderless.config import RecipeError, nearest
from leaderless.planner.workflow import Node, StageSpec, Workflow, spec_of
from leaderless.planner.workflow.builtin_stages import JOIN, ROW_STAGES, SELECT
from leaderless.planner.workflow.workflow import PLAIN_WORD, Condition, Value

DATA = "data"
"""The source of the columns that the dataloader provides, and its rows."""
AGENT = "agent"
"""The column that says which role sampled a row."""


@dataclass(frozen=True)
class RowSet:
    """Rows that some node made, or the data.

    Attributes:
        parents: Row sets that it was made from; several for a join.
        expanders: Nodes that made its samples from prompts; the data itself for rows without such a node.
        selected: Values that its rows have in columns by which they were selected.
        agents: Roles that sampled its rows, in the order of the workflow.
    """

    parents: tuple[str, ...] = ()
    expanders: frozenset[str] = frozenset({DATA})
    selected: Mapping[str, tuple[Value, ...]] | None = None
    agents: tuple[str, ...] = ()


class RowSets:
    """Row sets of a workflow, named by the node that made their rows.

    A node works on the rows of the last node before it that changes rows. If there are several, none of which comes
    after the others, it works on the rows of all: nodes are added before it that join them, one for each part; the last
    of them names the row set. If it selects rows, a node that drops the others is added before it. Equal joins and
    selections are made once. What is added comes after all nodes that write about the rows it takes, so that their
    columns are carried along.

    Attributes:
        workflow: The workflow with these nodes, and with the agents of each node.
        specs: Contract of each node.
        of: Row set that each node works on.
        after: Row set of each node's output, and of the data.
        asked_by: Node for which each node was added.
    """

    def __init__(self, workflow: Workflow) -> None:
        self.specs: dict[str, StageSpec] = {}
        self.of: dict[str, str] = {}
        self.after: dict[str, str] = {DATA: DATA}
        self.asked_by: dict[str, str] = {}
        self._sets: dict[str, RowSet] = {DATA: RowSet()}
        self._nodes: dict[str, Node] = {}
        self._written, self._repeated = workflow, list(workflow.repeated)
        self._joins: dict[tuple[str, ...], str] = {}
        self._selections: dict[tuple[str, tuple[Condition, ...]], str] = {}
        for node in workflow.order():
            self._add(node)
        for name in self.asked_by:
            self._await_columns(name)
        nodes = tuple(self._described(node) for node in self._nodes.values())
        self.workflow = replace(workflow, nodes=nodes, repeated=tuple(self._repeated))

    def lineage(self, row_set: str) -> frozenset[str]:
        """A row set and all that it was made from."""
        return frozenset({row_set, DATA}).union(*map(self.lineage, self._sets[row_set].parents))

    def makers(self, row_set: str) -> list[str]:
        """The nodes that put rows into a row set."""
        return [name for name, after in self.after.items() if after == row_set and self._changes_rows(name)]

    def _changes_rows(self, name: str) -> bool:
        return name != DATA and self.specs[name].rows != "same"

    def _described(self, node: Node) -> Node:
        """A node with what it is to know about its rows."""
        spec, agents = self.specs[node.name], self._sets[self.of[node.name]].agents
        sampling = list(dict.fromkeys(x.role for x in self._nodes.values() if x.role and self._samples(x)))
        trained = {x.role for x in self._nodes.values() if self.specs[x.name].role_use == "train"}
        own = [node.role] if spec.samples or spec.takes_own_rows else list(agents)
        tag = own[0] if len(sampling) > 1 and len(own) == 1 else None
        number = [x.name for x in self._nodes.values() if self.specs[x.name].samples]
        return replace(
            node,
            agents=agents,
            tag=tag or "",
            sampler=number.index(node.name) if spec.samples else 0,
            num_samplers=max(1, len(number)),
            team=tuple(role for role in sampling if role in trained),
            is_carried=bool(self._repeated) and node.name not in self._repeated,
        )

    def _samples(self, node: Node) -> bool:
        return self.specs[node.name].samples and node.role is not None

    def _add(self, node: Node) -> None:
        if node.run in ROW_STAGES:
            raise RecipeError.at(f"nodes.{node.name}.run", f"'{node.run}' is added by the planner: leave the node out")
        heads = self._heads(node)
        rows = heads[0] if len(heads) == 1 else self._joined(node, heads)
        if rows not in heads:
            node = replace(node, after=(*node.after, rows))
        selected = self._selection(node, rows)
        if selected != rows:
            node = replace(node, after=(*node.after, selected))
        self._place(node, selected)

    def _heads(self, node: Node) -> tuple[str, ...]:
        """The last row sets before a node."""
        found = list(dict.fromkeys(self.after[name] for name in node.after)) or [DATA]
        return tuple(
            row_set
            for row_set in found
            if not any(row_set in self.lineage(other) for other in found if other != row_set)
        )

    def _place(self, node: Node, rows: str) -> None:
        bare = spec_of(replace(node, judges=(), teachers=()))
        roles = bare.roles_of(node)
        main = next((role for name, role in roles.items() if bare.roles[name] == bare.role_use), None)
        if bare.role_use == "none" and node.teachers:
            main = node.teachers[0][1]
        node = replace(node, role=main, roles=(*roles.items(), *node.judges, *node.teachers))
        spec = spec_of(node)
        self._nodes[node.name], self.specs[node.name], self.of[node.name] = node, spec, rows
        self.after[node.name] = rows if spec.rows == "same" else node.name
        given, agents = self._sets[rows], (node.role,) if node.role else ()
        if spec.rows == "expand":
            if given.expanders != {DATA}:  # the samples of a sample would have no ids
                raise RecipeError.at(
                    f"nodes.{node.name}.after",
                    f"stage '{node.run}' makes samples of prompts, but the rows behind node "
                    f"'{max(given.expanders - {DATA})}' are samples already: leave one of the two nodes out",
                )
            self._sets[node.name] = RowSet((rows,), frozenset({node.name}), agents=agents)
        elif spec.rows == "extend":
            if given.expanders == {DATA}:
                raise RecipeError.at(
                    f"nodes.{node.name}.after",
                    f"stage '{node.run}' continues what others have sampled, but no node before '{node.name}' samples: "
                    "put it after one that runs 'rollout'",
                )
            agents = tuple(dict.fromkeys((*given.agents, *agents)))
            # New samples may have any value in the columns by which the given ones were selected.
            self._sets[node.name] = RowSet((rows,), given.expanders | {node.name}, agents=agents)
        elif spec.rows != "same":
            self._sets[node.name] = replace(given, parents=(rows,))

    def _insert(self, node: Node, rows: str, asked_by: Node) -> None:
        self._place(node, rows)
        self.asked_by[node.name] = asked_by.name
        if asked_by.name in self._repeated:
            self._repeated.insert(self._repeated.index(asked_by.name), node.name)

    def _joined(self, node: Node, heads: tuple[str, ...]) -> str:
        """The row set that holds the rows of several."""
        if heads in self._joins:
            return self._joins[heads]
        for first, second in combinations(heads, 2):
            if not self._are_disjoint(self._sets[first], self._sets[second]):
                raise RecipeError.at(
                    f"nodes.{node.name}.after",
                    f"'{first}' and '{second}' both change rows and neither comes after the other, so node "
                    f"'{node.name}' would get two sets of rows, which may hold the same ones: put them one after the "
                    "other; rows can be joined if different nodes sampled them, or `where` selects other values",
                )
        name = self._joins[heads] = self._free_name("joined")
        parts = [f"{name}_{head}" for head in heads[:-1]]
        for part, head in zip(parts, heads, strict=False):
            self._insert(Node(part, JOIN, after=(head,)), head, node)
            self.after[part] = name
        self._insert(Node(name, JOIN, after=(heads[-1], *parts)), heads[-1], node)
        sets = [self._sets[head] for head in heads]
        columns = set.intersection(*(set(row_set.selected or {}) for row_set in sets))
        self._sets[name] = RowSet(
            heads,
            frozenset[str]().union(*(row_set.expanders for row_set in sets)),
            {
                column: tuple(dict.fromkeys(x for one in sets for x in (one.selected or {})[column]))
                for column in columns
            },
            tuple(dict.fromkeys(agent for row_set in sets for agent in row_set.agents)),
        )
        return name

    @staticmethod
    def _are_disjoint(first: RowSet, second: RowSet) -> bool:
        """Whether no row can be in both, and both hold samples or both prompts."""
        mine, others = first.selected or {}, second.selected or {}
        if any(set(mine[column]).isdisjoint(others[column]) for column in mine.keys() & others.keys()):
            return (DATA in first.expanders) == (DATA in second.expanders)
        return first.expanders.isdisjoint(second.expanders) and DATA not in first.expanders | second.expanders

    def _selection(self, node: Node, rows: str) -> str:
        """The row set with those rows that a node selects; the rows themselves if it selects all of them."""
        given, conditions = self._sets[rows], list[Condition]()
        selected = dict(given.selected or {})
        for column, values in node.where:
            if column == AGENT:
                selected.setdefault(AGENT, given.agents)
                strange = next((value for value in values if value not in given.agents), None)
                if strange is not None:
                    raise RecipeError.at(
                        f"nodes.{node.name}.where.{AGENT}",
                        f"no row before node '{node.name}' is sampled by a role "
                        f"'{strange}'{nearest(str(strange), given.agents)}",
                    )
            kept = tuple(value for value in values if value in selected.get(column, values))
            if not kept:
                raise RecipeError.at(
                    f"nodes.{node.name}.where.{column}",
                    f"no row is left: those of '{rows}' were selected by {column}="
                    f"{', '.join(map(str, selected[column]))} before",
                )
            if set(kept) != set(selected.get(column, ())):
                conditions.append((column, kept))
            selected[column] = kept
        if not conditions:
            return rows
        key = rows, tuple(conditions)
        if key not in self._selections:
            words = [str(value) for _, values in conditions for value in values]
            name = "_".join(["only", *words])
            name = self._selections[key] = self._free_name(name if PLAIN_WORD.fullmatch(name) else "only")
            self._insert(Node(name, SELECT, after=node.after, where=key[1]), rows, node)
            agents = tuple(agent for agent in given.agents if agent in selected.get(AGENT, given.agents))
            self._sets[name] = RowSet((rows,), given.expanders, selected, agents)
        return self._selections[key]

    def _await_columns(self, name: str) -> None:
        """Let an added node come after all that write about its rows and do not come after it themselves."""
        for node in self._nodes.values():
            if self.after[node.name] != self.of[name] or self._changes_rows(node.name):
                continue
            if self.specs[node.name].writes and name not in self._before(node.name):
                mine = self._nodes[name]
                self._nodes[name] = replace(mine, after=tuple(dict.fromkeys((*mine.after, node.name))))

    def _before(self, name: str) -> set[str]:
        """Names of all nodes before a node."""
        found, waiting = set[str](), [name]
        while waiting:
            new = [other for other in self._nodes[waiting.pop()].after if other not in found]
            found.update(new)
            waiting += new
        return found

    def _free_name(self, name: str) -> str:
        taken = {*self._nodes, *(node.name for node in self._written.nodes)}
        names = (name if number == 1 else f"{name}{number}" for number in range(1, len(taken) + 2))
        return next(free for free in names if free not in taken)
