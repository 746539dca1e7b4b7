"""What several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from leaderless.config import LoadedRecipe, Recipe, RecipeError
from leaderless.planner import Cluster, Plan, make_plan
from leaderless.rollout.choose import choose_engine
from leaderless.workflow import load_recipe, resolve_workflow

console = Console()
errors = Console(stderr=True)


@dataclass(frozen=True)
class Planned:
    """A recipe and what the planner made of it."""

    loaded: LoadedRecipe
    plan: Plan

    @property
    def recipe(self) -> Recipe:
        """What the user set."""
        return self.loaded.recipe


def plan_recipe(path: Path, overrides: Sequence[str], num_workers: int) -> Planned:
    """Read a recipe and plan it.

    Args:
        path: The recipe.
        overrides: `section.key=value` each.
        num_workers: To plan for.

    Raises:
        RecipeError: Something is wrong with it; every problem has its place.
    """
    loaded = load_recipe(path, overrides)
    try:
        workflow = resolve_workflow(loaded.recipe.workflow)
        return Planned(
            loaded, make_plan(loaded.recipe, workflow, Cluster(num_workers, choose_engine(loaded.recipe.rollout)))
        )
    except RecipeError as error:
        raise loaded.locate(error) from error


def recipe_path(target: Path) -> Path:
    """The recipe that a command is given: a file, or the one that a run's folder holds.

    Args:
        target: Of the command.
    """
    return target / "config.yaml" if target.is_dir() else target


def print_path(label: str, path: Path) -> None:
    """Print where something is, on one line that can be copied.

    Args:
        label: What it is.
        path: Where.
    """
    console.print(f"{label}: [bold]{escape(str(path))}", highlight=False, soft_wrap=True)


def print_line(text: str) -> None:
    """Print a line for people that may hold anything.

    Args:
        text: Shown as it is.
    """
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value for programs to read.

    Args:
        value: JSON-able.
    """
    typer.echo(json.dumps(value, indent=2))
