"""What several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer

from leaderless.run.planned import Planned, plan_training
from leaderless.workflow import load_recipe


def plan_recipe(path: Path, overrides: Sequence[str], num_workers: int) -> Planned:
    """Read a recipe and plan it.

    Args:
        path: The recipe.
        overrides: Settings as `section.key=value`.
        num_workers: Number of workers.

    Raises:
        RecipeError: Something in it is wrong; every problem has its place.
    """
    return plan_training(load_recipe(path, overrides), num_workers)


def recipe_path(target: Path) -> Path:
    """The recipe that a command is given: a file, or the one that a run's folder holds.

    Args:
        target: Argument of the command.
    """
    return target / "config.yaml" if target.is_dir() else target


def print_json(value: object) -> None:
    """Print a value for programs to read.

    Args:
        value: Any value that JSON can hold.
    """
    typer.echo(json.dumps(value, indent=2))
