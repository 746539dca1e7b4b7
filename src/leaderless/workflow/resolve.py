"""From the name in a recipe to the workflow that it means, and from a file to the recipe with its workflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path

from leaderless.config import LoadedRecipe, RecipeError, nearest
from leaderless.config import load as config_load
from leaderless.config.functions import is_function_name, load_function
from leaderless.config.source import Setting
from leaderless.workflow.workflow import Workflow, read_workflow


def builtin_workflows() -> tuple[str, ...]:
    """Names of the built-in workflows: one YAML file each."""
    folder = files("leaderless.workflow") / "builtin"
    return tuple(sorted(Path(file.name).stem for file in folder.iterdir() if file.name.endswith(".yaml")))


def resolve_workflow(name: str) -> Workflow:
    """The workflow that a recipe names.

    Args:
        name: A built-in workflow, the path of a YAML file, or `package.module:function` that returns a `Workflow`.

    Raises:
        RecipeError: There is no such workflow, or it is not well-formed.
    """
    if name in builtin_workflows():
        with as_file(files("leaderless.workflow") / "builtin" / f"{name}.yaml") as path:
            return read_workflow(path, resolve_workflow)
    if name.endswith((".yaml", ".yml")):
        return read_workflow(Path(name), resolve_workflow)
    if is_function_name(name):
        workflow = load_function(name, "workflow", num_arguments=0)()
        if not isinstance(workflow, Workflow):
            raise RecipeError.at("workflow", f"'{name}' returned {type(workflow).__name__}, not a Workflow")
        workflow.order()
        return workflow
    raise RecipeError.at(
        "workflow", f"unknown workflow '{name}'{nearest(name, builtin_workflows())}; a file must end in .yaml"
    )


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check a recipe; where it has no setting of the algorithm, that of its workflow holds.

    Args:
        path: The YAML file.
        overrides: `section.key=value` each, applied on top of the file in order.

    Raises:
        RecipeError: Something in it is wrong; all problems are named, each with its place.
    """
    return config_load.load_recipe(path, overrides, _settings_of)


def _settings_of(workflow: str) -> Mapping[str, Setting]:
    """The settings that a workflow brings along."""
    return {"algorithm": resolve_workflow(workflow).algorithm}
