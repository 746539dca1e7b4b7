"""Reads workflows, and recipes together with the settings of their workflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

import yaml

from leaderless.base.named_functions import is_function_name, load_function
from leaderless.config import LoadedRecipe, Problem, RecipeError, nearest
from leaderless.config import load as config_load
from leaderless.config.source import RecipeSource, Setting, merge_settings, read_yaml
from leaderless.planner.workflow.builtin_stages import KEEP, RESPOND
from leaderless.planner.workflow.workflow import Workflow


def builtin_workflows() -> tuple[str, ...]:
    """Names of the built-in workflows: one YAML file each."""
    folder = files("leaderless.planner.workflow") / "builtin"
    return tuple(sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml")))


def resolve_workflow(name: str) -> Workflow:
    """The workflow that a recipe names: a built-in one, a YAML file, or `package.module:function` that returns one.

    Raises:
        RecipeError: There is no such workflow, or it is not well-formed.
    """
    if name in builtin_workflows():
        with as_file(files("leaderless.planner.workflow") / "builtin" / f"{name}.yaml") as path:
            return read_workflow(path)
    if name.endswith((".yaml", ".yml")):
        return read_workflow(Path(name))
    if is_function_name(name):
        workflow = load_function(name, "workflow", num_arguments=0)()
        if not isinstance(workflow, Workflow):
            raise RecipeError.at("workflow", f"'{name}' returned {type(workflow).__name__}, not a Workflow")
        workflow.order()
        return workflow
    raise RecipeError.at(
        "workflow", f"unknown workflow '{name}'{nearest(name, builtin_workflows())}; a file must end in .yaml"
    )


def read_workflow(path: Path) -> Workflow:
    """Read a workflow from YAML.

    The file has `name` and `nodes`; each node has `run` and may have `role` or `roles`, `after` and `where`. There may
    be `algorithm`, `repeat` (a list of nodes) and `base`: another workflow, whose nodes and settings are inherited
    where the file has none.

    Raises:
        RecipeError: The file is missing, is not YAML, or is not such a mapping.
    """
    source = read_yaml(path)
    if problems := list(_shape_problems(source)):
        raise RecipeError([Problem(p.key, p.message, source.place_of(p.key)) for p in problems])
    settings = source.settings
    try:
        base = resolve_workflow(str(settings["base"])) if "base" in settings else Workflow("")
        workflow = _workflow_of(settings, base)
        workflow.order()
    except RecipeError as error:
        raise RecipeError(
            [Problem(p.key, p.message, p.place or source.place_of(p.key)) for p in error.problems]
        ) from error
    return workflow


def _workflow_of(settings: Mapping[str, Setting], base: Workflow) -> Workflow:
    name, nodes, algorithm = settings["name"], settings.get("nodes", {}), settings.get("algorithm", {})
    assert isinstance(name, str)
    assert isinstance(nodes, Mapping)
    assert isinstance(algorithm, Mapping)
    kept = tuple(node for node in base.nodes if node.name not in nodes)
    repeated = settings.get("repeat", base.repeated)
    assert isinstance(repeated, Sequence)
    workflow = Workflow(name, kept, merge_settings(base.algorithm, algorithm), tuple(map(str, repeated)))
    for node_name, node in nodes.items():
        workflow = workflow.node(
            str(node_name),
            run=node["run"],
            role=node.get("role"),
            after=node.get("after") or (),
            where=node.get("where"),
            roles=node.get("roles"),
        )
    return workflow


def write_workflow(workflow: Workflow) -> str:
    """The workflow as YAML, which `read_workflow` reads back to an equal object."""
    nodes: dict[str, dict[str, object]] = {}
    for node in workflow.nodes:
        nodes[node.name] = {"run": node.run}
        if node.role:
            nodes[node.name]["role"] = node.role
        if node.after:
            nodes[node.name]["after"] = list(node.after)
        if node.roles:
            nodes[node.name]["roles"] = dict(node.roles)
        if node.where:
            nodes[node.name]["where"] = {column: list(values) for column, values in node.where}
    algorithm = {"algorithm": dict(workflow.algorithm)} if workflow.algorithm else {}
    repeat = {"repeat": list(workflow.repeated)} if workflow.repeated else {}
    return yaml.safe_dump({"name": workflow.name, **repeat, **algorithm, "nodes": nodes}, sort_keys=False)


def _shape_problems(source: RecipeSource) -> Iterator[Problem]:
    known = {"name": (str, "a name"), "base": (str, "a workflow"), "algorithm": (dict, "settings of the algorithm")}
    known |= {"repeat": (list, "a list of nodes"), "nodes": (dict, "the nodes by name")}
    required = {"name"} if "base" in source.settings else {"name", "nodes"}
    names = [str(key) for key in source.settings]
    yield from (Problem(name, f"unknown key{nearest(name, known)}") for name in names if name not in known)
    for key, (kind, meaning) in known.items():
        if (key in required or key in names) and not isinstance(source.settings.get(key), kind):
            yield Problem(key, f"must be given: {meaning}")
    nodes = source.settings.get("nodes")
    for name, node in nodes.items() if isinstance(nodes, dict) else ():
        if not isinstance(name, str):
            yield Problem(f"nodes.{name}", "a node's name must be text; put it in quotes")
        yield from _node_problems(f"nodes.{name}", node)


def _node_problems(key: str, node: object) -> Iterator[Problem]:
    if not isinstance(node, dict):
        yield Problem(key, "must be a mapping such as {run: reward, after: rollout}")
        return
    known = ("run", "role", "roles", "after", "where")
    for inner in node:
        if inner not in known:
            yield Problem(f"{key}.{inner}", f"unknown key{nearest(str(inner), known)}")
    if not isinstance(node.get("run"), str):
        yield Problem(f"{key}.run", "must name a stage")
    role = node.get("role")
    if role is not None and (not isinstance(role, str) or not role):
        yield Problem(f"{key}.role", "must name a role")
    roles = node.get("roles")
    if roles is not None and not (isinstance(roles, dict) and all(isinstance(r, str) and r for r in roles.values())):
        yield Problem(f"{key}.roles", "must be a mapping from parameters to roles, such as {judge: reference}")
    after = [] if node.get("after") is None else node["after"]
    if not isinstance(after, str) and not (isinstance(after, list) and all(isinstance(a, str) for a in after)):
        yield Problem(f"{key}.after", "must name a node or list nodes")
    yield from _where_problems(f"{key}.where", node.get("where"))


def _where_problems(key: str, where: object) -> Iterator[Problem]:
    if where is not None and not isinstance(where, dict):
        yield Problem(key, "must be a mapping from columns to values, such as {agent: solver}")
        return
    for column, given in (where or {}).items():
        values = given if isinstance(given, list) else [given]
        if not isinstance(column, str) or not all(isinstance(value, str | int) for value in values):
            yield Problem(f"{key}.{column}", "must be text, a whole number, true or false, or a list of these")


@dataclass(frozen=True)
class WorkflowRecipe(LoadedRecipe):
    """A recipe with the workflow that it names, which is read once."""

    workflow: Workflow


def load_recipe(recipe: str | Path | RecipeSource, overrides: Sequence[str] = ()) -> WorkflowRecipe:
    """Read and check a recipe; settings of the algorithm that it lacks come from its workflow.

    Args:
        recipe: YAML file, or settings that have been read already.
        overrides: `section.key=value` each, applied on top of it in order.

    Raises:
        RecipeError: There are problems; all are named, each with its place.
    """
    found: list[Workflow] = []

    def defaults_of(name: str) -> Mapping[str, Setting]:
        found.append(resolve_workflow(name))
        return {"algorithm": found[0].algorithm}

    loaded = config_load.load_recipe(recipe, overrides, defaults_of)
    return WorkflowRecipe(loaded.recipe, loaded.source, *found)


ANSWER = "answer"
"""Name of the node that samples the responses."""
JUDGE = "judge"
"""Name of the node that has the judges which are models of the recipe."""


def evaluation_workflow(role: str, *, is_judged: bool = False) -> Workflow:
    """A workflow in which a role answers; with judges that are models, they have a node, and so a layout, as well."""
    workflow = Workflow("evaluation").node(ANSWER, run=RESPOND, role=role)
    return workflow.node(JUDGE, run=KEEP, after=ANSWER) if is_judged else workflow
