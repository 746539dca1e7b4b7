"""The graph of nodes to compute, some of them perhaps repeated, without hardware."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter

from leaderless.config import Problem, RecipeError, nearest
from leaderless.config.source import Setting

Value = str | int | bool
"""A value that a node selects rows by."""
Condition = tuple[str, tuple[Value, ...]]
"""A column, and the values that selected rows have there."""
PLAIN_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Node:
    """A stage function in its place in the graph.

    Attributes:
        name: Unique within the workflow.
        run: Built-in stage, or `package.module:function`.
        role: Model that it uses, if any.
        after: Nodes that it comes after; without any, it begins with the data.
        where: Conditions that its rows meet, all of them; the others are left out.
        roles: Models of a stage that uses several: parameter and role. The planner completes it, and `role` is then the
            main one of them.
        agents: Roles that sampled its rows, as the planner finds out.
        tag: Role that its metrics name, where several roles sample; the planner finds it out.
        sampler: Number of the node among those that make samples, from 0; the planner counts them.
        num_samplers: Number of nodes that make samples.
        team: Trained roles that sample, in the order of the workflow, as the planner finds out.
        is_carried: Whether surplus of repeated nodes may be among its rows; the planner finds it out.
        teachers: Teachers of a node that learns from them or asks them, with their roles; the planner names them.
        judges: Rewards that ask a model of the recipe, with its role, of a node that grades; the planner names them.
    """

    name: str
    run: str
    role: str | None = None
    after: tuple[str, ...] = ()
    where: tuple[Condition, ...] = ()
    roles: tuple[tuple[str, str], ...] = ()
    agents: tuple[str, ...] = ()
    tag: str = ""
    sampler: int = 0
    num_samplers: int = 1
    team: tuple[str, ...] = ()
    is_carried: bool = False
    judges: tuple[tuple[str, str], ...] = ()
    teachers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Workflow:
    """A named graph of nodes, in the order they were written.

    YAML and this builder give equal objects:

        Workflow("grpo").node("rollout", run="rollout", role="policy").node("reward", run="reward", after="rollout")

    Attributes:
        name: Name of the workflow.
        nodes: Nodes of the workflow.
        algorithm: Settings for the recipe's section `algorithm`, which hold where the recipe has none.
        repeated: Nodes that are repeated within a step until enough groups come out of the last one, as configured in
            the recipe's `algorithm.repeat`; the first begins with the data. Surplus groups wait for the next step.
    """

    name: str
    nodes: tuple[Node, ...] = ()
    algorithm: Mapping[str, Setting] = field(default_factory=dict)
    repeated: tuple[str, ...] = ()

    def node(
        self,
        name: str,
        *,
        run: str,
        role: str | None = None,
        after: str | Sequence[str] = (),
        where: Mapping[str, Value | Sequence[Value]] | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> Workflow:
        """This workflow with one more node.

        Args:
            name: Unique within the workflow.
            run: Built-in stage, or `package.module:function`.
            role: Model that it uses, if any.
            after: Node or nodes that it comes after.
            where: Rows that it works on: the value, or the values, that they have in each of these columns. In the
                column `agent` it is the name of the role that sampled them.
            roles: Models of a stage that uses several: the role for each of its parameters.
        """
        after = (after,) if isinstance(after, str) else tuple(after)
        conditions = tuple(
            (column, (values,) if isinstance(values, Value) else tuple(values))
            for column, values in (where or {}).items()
        )
        return replace(
            self, nodes=(*self.nodes, Node(name, run, role, after, conditions, tuple((roles or {}).items())))
        )

    def repeat(self, *names: str) -> Workflow:
        """This workflow with some nodes repeated.

        Args:
            *names: Nodes to repeat, from the one that begins with the data to the one whose groups are counted.
        """
        return replace(self, repeated=names)

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def order(self) -> tuple[Node, ...]:
        """The nodes in an order that keeps every `after`; otherwise as written.

        Raises:
            RecipeError: A name is empty, used twice or unknown, the nodes form a cycle, or repeated nodes have more
                than one entry or exit.
        """
        _refuse(self._name_problems())
        sorter = TopologicalSorter({node.name: node.after for node in self.nodes})
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise RecipeError.at(f"nodes.{error.args[1][0]}.after", f"nodes form a cycle: {cycle}") from error
        done: dict[str, Node] = {}
        while len(done) < len(self.nodes):
            ready = next(node for node in self.nodes if node.name not in done and done.keys() >= {*node.after})
            done[ready.name] = ready
        _refuse(self._repeat_problems(_ancestors(done.values())))
        return tuple(done.values())

    def ancestors(self) -> dict[str, frozenset[str]]:
        """For each node the names of all nodes that come before it."""
        return _ancestors(self.order())

    def _repeat_problems(self, before: Mapping[str, frozenset[str]]) -> Iterator[Problem]:
        """Repeated nodes begin with the data and end in one node, which everything else comes after."""
        if not self.repeated:
            return
        first, last = self.repeated[0], self.repeated[-1]
        if self[first].after:
            yield Problem("repeat", f"its first node '{first}' must begin with the data: take out its `after`")
        for name in self.repeated[:-1]:
            if name not in before[last]:
                yield Problem("repeat", f"its last node is '{last}', so node '{name}' must come before that")
        for node in self.nodes:
            if node.name not in self.repeated and last not in before[node.name]:
                yield Problem(
                    f"nodes.{node.name}.after",
                    f"node '{node.name}' is not repeated as ({', '.join(self.repeated)}) are, so it must come "
                    f"after the last of those: add '{last}', or put the node into `repeat`",
                )

    def _name_problems(self) -> Iterator[Problem]:
        names = [node.name for node in self.nodes]
        if not names:
            yield Problem("nodes", "must hold at least one node")
        for name in sorted(set(names)):
            if not PLAIN_WORD.fullmatch(name) or name == "data":
                yield Problem(f"nodes.{name}", "a node's name must be a plain word, and `data` names the dataloader")
            if names.count(name) > 1:
                yield Problem(f"nodes.{name}", "two nodes have this name")
        for node in self.nodes:
            yield from _node_problems(node, names)
        for name in dict.fromkeys(self.repeated):
            if name not in names:
                yield Problem("repeat", f"no node is called '{name}'{nearest(name, names)}")
            elif self.repeated.count(name) > 1:
                yield Problem("repeat", f"node '{name}' is named twice")


def _node_problems(node: Node, names: Sequence[str]) -> Iterator[Problem]:
    # Checkpoints have a folder for each role.
    named = {"role": node.role} | {f"roles.{name}": role for name, role in node.roles}
    for key, role in named.items():
        if role is not None and not PLAIN_WORD.fullmatch(role):
            yield Problem(f"nodes.{node.name}.{key}", f"'{role}' must be a plain word, as `policy`")
    for column, values in node.where:
        if not values:
            yield Problem(f"nodes.{node.name}.where.{column}", "must name at least one value")
    for name in node.after:
        if name not in names:
            yield Problem(f"nodes.{node.name}.after", f"no node is called '{name}'{nearest(name, names)}")


def _refuse(problems: Iterable[Problem]) -> None:
    if found := list(problems):
        raise RecipeError(found)


def _ancestors(order: Iterable[Node]) -> dict[str, frozenset[str]]:
    """For each node the names of all nodes before it, given the nodes in order."""
    before: dict[str, frozenset[str]] = {}
    for node in order:
        before[node.name] = frozenset(node.after).union(*(before[name] for name in node.after))
    return before
