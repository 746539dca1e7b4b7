"""`leaderless convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from leaderless.config import RecipeError, nearest
from leaderless.observability.console import console, errors, print_line, print_path

FROM = "Framework: verl, trl (GRPO), trl-dpo, trl-kto or trl-reward"


def convert(
    file: Annotated[Path, typer.Argument(help="Configuration of verl or TRL as YAML, or a script that starts verl.")],
    out: Annotated[Path, typer.Option(help="Recipe to write.")] = Path("recipe.yaml"),
    source: Annotated[str, typer.Option("--from", help=f"{FROM}; by default the one that fits.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes of TRL, on which its batch sizes depend.")] = 1,
) -> None:
    """Write a recipe from a configuration of verl or TRL, and list what it could not take over."""
    from leaderless.cli.convert_config.convert import TABLES, guess, read_configuration
    from leaderless.cli.convert_config.convert import convert as make
    from leaderless.observability.run_directory import write_atomically
    from leaderless.planner.workflow import load_recipe

    values = read_configuration(file)
    if source and source not in TABLES:
        raise RecipeError.at("", f"--from {source}: unknown framework{nearest(source, TABLES)}")
    if out.exists():
        raise RecipeError.at("", f"{out} exists already: give another --out, or move it away")
    framework = next((name for name in TABLES if name == source), None) or guess(values)
    made = make(values, framework, workers)
    write_atomically(out, made.text(file.name))
    print_path("recipe", out)
    print_line(f"{len(made.taken)} settings of {framework} taken over, {len(made.needless)} not needed here")
    if made.left:
        table = Table(title="not taken over", title_justify="left")
        for title in ("key", "value", "why, and what to do"):
            table.add_column(title, overflow="fold")  # a key that is cut names nothing
        for left in made.left:
            table.add_row(escape(left.key), escape(str(left.value)), escape(left.reason))
        console.print(table)
    try:
        load_recipe(out)
    except RecipeError as error:
        errors.print(f"[red bold]still to correct[/]\n{escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    print_line(f"next: leaderless plan {out} --world-size {workers}")
