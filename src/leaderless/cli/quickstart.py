"""Commands for the first minutes: `leaderless quickstart` and `leaderless new`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from leaderless.observability.console import print_line


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of every training.")] = None,
    robot: Annotated[bool, typer.Option("--robot", help="Show an arm that learns to reach, not a model.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Number of workers; 0 for two, or one on a single core.")] = 0,
) -> None:
    """Train a tiny model from nothing, on the CPU, in a few minutes; everything is written to `runs`."""
    from leaderless.cli.quickstart_project.commands import CommandError, Show

    show = Show(Path.cwd(), workers or min(2, len(os.sched_getaffinity(0))), tuple(overrides or ()))
    try:
        if robot:
            from leaderless.cli.quickstart_project.robot import show_robot

            show_robot(show)
        else:
            from leaderless.cli.quickstart_project.language import show_language

            show_language(show)
    except CommandError as error:
        raise typer.Exit(error.code) from error


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make.")],
    model: Annotated[str, typer.Option(help="Folder or hub name of a model, in place of a tiny one.")] = "",
) -> None:
    """Write a small project that trains at once: a recipe, data, a reward, and a test."""
    from leaderless.cli.quickstart_project.project import write_project

    try:
        write_project(folder, model)
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror or error}") from error
    print_line(f"written: {folder}")
    print_line(f"next:    cd {folder} && leaderless train recipe.yaml")
