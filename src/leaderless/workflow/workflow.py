"""What to compute: a directed acyclic graph of nodes, with no hardware in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import yaml

from leaderless.config import Problem, RecipeError, nearest
from leaderless.config.load import merge_settings
from leaderless.config.source import RecipeSource, Setting, read_yaml
from leaderless.workflow.node import Node


@dataclass(frozen=True)
class Workflow:
    """A named graph of nodes, in the order they were written.

    YAML and this builder give equal objects:

        Workflow("grpo").node("rollout", run="rollout", role="policy").node("reward", run="reward", after="rollout")

    Attributes:
        name: Of the workflow.
        nodes: Its nodes.
        algorithm: Settings of the recipe's section `algorithm`, which hold where the recipe has none.
    """

    name: str
    nodes: tuple[Node, ...] = ()
    algorithm: Mapping[str, Setting] = field(default_factory=dict)

    def node(self, name: str, *, run: str, role: str | None = None, after: str | Sequence[str] = ()) -> Workflow:
        """This workflow with one more node.

        Args:
            name: Unique within the workflow.
            run: A registered stage, or `package.module:function`.
            role: The model that it uses, if it uses one.
            after: The node or nodes that it comes after.
        """
        after = (after,) if isinstance(after, str) else tuple(after)
        return replace(self, nodes=(*self.nodes, Node(name, run, role, after)))

    def __getitem__(self, name: str) -> Node:
        """The node of a name."""
        return next(node for node in self.nodes if node.name == name)

    def order(self) -> tuple[Node, ...]:
        """The nodes, each behind those it comes after; otherwise as written.

        Raises:
            RecipeError: A name is empty, used twice or unknown, or the nodes form a cycle.
        """
        self._check_names()
        sorter = TopologicalSorter({node.name: node.after for node in self.nodes})
        try:
            sorter.prepare()
        except CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise RecipeError.at(f"nodes.{error.args[1][0]}.after", f"nodes form a cycle: {cycle}") from error
        done: list[Node] = []
        names: set[str] = set()
        while len(done) < len(self.nodes):
            ready = next(node for node in self.nodes if node.name not in names and names.issuperset(node.after))
            done.append(ready)
            names.add(ready.name)
        return tuple(done)

    def ancestors(self) -> dict[str, frozenset[str]]:
        """For each node the names of all nodes that come before it."""
        before: dict[str, frozenset[str]] = {}
        for node in self.order():
            before[node.name] = frozenset(node.after).union(*(before[name] for name in node.after))
        return before

    def _check_names(self) -> None:
        names = [node.name for node in self.nodes]
        problems: list[Problem] = []
        if not names:
            problems.append(Problem("nodes", "must hold at least one node"))
        for name in sorted(set(names)):
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or name == "data":
                problems.append(
                    Problem(f"nodes.{name}", "a node's name must be a plain word, and `data` names the dataloader")
                )
            if names.count(name) > 1:
                problems.append(Problem(f"nodes.{name}", "two nodes have this name"))
        for node in self.nodes:
            problems.extend(
                Problem(f"nodes.{node.name}.after", f"no node is called '{name}'{nearest(name, names)}")
                for name in node.after
                if name not in names
            )
        if problems:
            raise RecipeError(problems)


def read_workflow(path: Path, base_of: Callable[[str], Workflow]) -> Workflow:
    """Read a workflow from YAML.

    Args:
        path: A file with `name` and `nodes`; each node has `run` and may have `role` and `after`. It may have
            `algorithm`, and `base`: another workflow, whose nodes and settings it takes over where it has none of its
            own.
        base_of: The workflow of a name.

    Raises:
        RecipeError: The file is missing, is not YAML, or is not such a mapping.
    """
    source = read_yaml(path)
    problems = _shape_problems(source)
    if problems:
        raise RecipeError([Problem(p.key, p.message, source.place_of(p.key)) for p in problems])
    settings = source.settings
    try:
        base = base_of(str(settings["base"])) if "base" in settings else Workflow("")
        workflow = _workflow_of(settings, base)
        workflow.order()
    except RecipeError as error:
        raise RecipeError(
            [Problem(p.key, p.message, p.place or source.place_of(p.key)) for p in error.problems]
        ) from error
    return workflow


def _workflow_of(settings: Mapping[str, Setting], base: Workflow) -> Workflow:
    """The workflow that checked settings describe."""
    name, nodes, algorithm = settings["name"], settings.get("nodes", {}), settings.get("algorithm", {})
    assert isinstance(name, str)
    assert isinstance(nodes, Mapping)
    assert isinstance(algorithm, Mapping)
    kept = tuple(node for node in base.nodes if node.name not in nodes)
    workflow = Workflow(name, kept, merge_settings(base.algorithm, algorithm))
    for node_name, node in nodes.items():
        workflow = workflow.node(str(node_name), run=node["run"], role=node.get("role"), after=node.get("after") or ())
    return workflow


def write_workflow(workflow: Workflow) -> str:
    """The workflow as YAML that `read_workflow` reads back to an equal object.

    Args:
        workflow: What to write.
    """
    nodes: dict[str, dict[str, object]] = {}
    for node in workflow.nodes:
        nodes[node.name] = {"run": node.run}
        if node.role:
            nodes[node.name]["role"] = node.role
        if node.after:
            nodes[node.name]["after"] = list(node.after)
    algorithm = {"algorithm": dict(workflow.algorithm)} if workflow.algorithm else {}
    return yaml.safe_dump({"name": workflow.name, **algorithm, "nodes": nodes}, sort_keys=False)


def _shape_problems(source: RecipeSource) -> list[Problem]:
    """What keeps a YAML mapping from being a workflow."""
    known = {"name": (str, "a name"), "base": (str, "a workflow"), "algorithm": (dict, "settings of the algorithm")}
    known["nodes"] = (dict, "the nodes by name")
    required = {"name"} if "base" in source.settings else {"name", "nodes"}
    names = [str(key) for key in source.settings]
    problems = [Problem(name, f"unknown key{nearest(name, known)}") for name in names if name not in known]
    for key, (kind, meaning) in known.items():
        if (key in required or key in names) and not isinstance(source.settings.get(key), kind):
            problems.append(Problem(key, f"must be given: {meaning}"))
    nodes = source.settings.get("nodes")
    for name, node in nodes.items() if isinstance(nodes, dict) else ():
        if not isinstance(name, str):
            problems.append(Problem(f"nodes.{name}", "a node's name must be text; put it in quotes"))
        problems.extend(_node_problems(f"nodes.{name}", node))
    return problems


def _node_problems(key: str, node: object) -> Iterable[Problem]:
    """What keeps one entry of `nodes` from being a node."""
    if not isinstance(node, dict):
        yield Problem(key, "must be a mapping such as {run: reward, after: rollout}")
        return
    known = ("run", "role", "after")
    for inner in node:
        if inner not in known:
            yield Problem(f"{key}.{inner}", f"unknown key{nearest(str(inner), known)}")
    if not isinstance(node.get("run"), str):
        yield Problem(f"{key}.run", "must name a stage")
    role = node.get("role")
    if role is not None and (not isinstance(role, str) or not role):
        yield Problem(f"{key}.role", "must name a role")
    after = [] if node.get("after") is None else node["after"]
    if not isinstance(after, str) and not (isinstance(after, list) and all(isinstance(a, str) for a in after)):
        yield Problem(f"{key}.after", "must name a node or list nodes")
