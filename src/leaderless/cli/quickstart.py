"""Commands for the first minutes: `leaderless quickstart`, `new`, and `convert`, for those who come from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from leaderless.config import RecipeError, nearest
from leaderless.observability.console import console, errors, print_line, print_path
from leaderless.observability.run_directory import write_atomically
from leaderless.planner.workflow import load_recipe

FROM = "Framework: verl, trl (GRPO), trl-dpo, trl-kto or trl-reward"


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of every training.")] = None,
    robot: Annotated[bool, typer.Option("--robot", help="Show an arm that learns to reach, not a model.")] = False,
    real: Annotated[
        bool, typer.Option("--real", help="Train a pretrained model on word problems; needs 16 GiB.")
    ] = False,
    model: Annotated[str, typer.Option(help="Folder or hub name of the pretrained model; implies --real.")] = "",
    workers: Annotated[int, typer.Option(min=0, help="Number of workers; 0 for two, or one where that is better.")] = 0,
) -> None:
    """Train a tiny model from nothing, on the CPU, in a few minutes; everything is written to `runs`."""
    from leaderless.cli.quickstart_project.demonstrations import (
        CommandError,
        Show,
        show_language,
        show_pretrained,
        show_robot,
    )

    if robot and (real or model):
        raise typer.BadParameter("--robot shows an arm, which has no use for --real and --model: leave one out")
    is_real = real or bool(model)
    # One worker with all threads holds the weights of a pretrained model once.
    most = 1 if is_real else min(2, len(os.sched_getaffinity(0)))
    show = Show(Path.cwd(), workers or most, tuple(overrides or ()))
    try:
        if robot:
            show_robot(show)
        elif is_real:
            show_pretrained(show, model)
        else:
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


def convert(
    file: Annotated[Path, typer.Argument(help="Configuration of verl or TRL as YAML, or a script that starts verl.")],
    out: Annotated[Path, typer.Option(help="Recipe to write.")] = Path("recipe.yaml"),
    source: Annotated[str, typer.Option("--from", help=f"{FROM}; by default the one that fits.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes of TRL, on which its batch sizes depend.")] = 1,
) -> None:
    """Write a recipe from a configuration of verl or TRL, and list what it could not take over."""
    from leaderless.cli.convert_config import convert as conversion

    values = conversion.read_configuration(file)
    if source and source not in conversion.TABLES:
        raise RecipeError.at("", f"--from {source}: unknown framework{nearest(source, conversion.TABLES)}")
    if out.exists():
        raise RecipeError.at("", f"{out} exists already: give another --out, or move it away")
    framework = next((name for name in conversion.TABLES if name == source), None) or conversion.guess(values)
    made = conversion.convert(values, framework, workers)
    write_atomically(out, made.text(file.name))
    print_path("recipe", out)
    print_line(f"{len(made.taken)} settings of {framework} taken over, {len(made.needless)} not needed here")
    if made.left:
        # A key that is cut names nothing.
        columns = (Column(title, overflow="fold") for title in ("key", "value", "why, and what to do"))
        table = Table(*columns, title="not taken over", title_justify="left")
        for left in made.left:
            table.add_row(escape(left.key), escape(str(left.value)), escape(left.reason))
        console.print(table)
    try:
        load_recipe(out)
    except RecipeError as error:
        errors.print(f"[red bold]still to correct[/]\n{escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    print_line(f"next: leaderless plan {out} --world-size {workers}")
