"""Commands that start nothing: `leaderless plan` and `leaderless schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.config import Recipe
from leaderless.observability.console import console, print_json, print_path
from leaderless.observability.run_directory import write_atomically
from leaderless.planner.show.placement import choice_to_json, print_choice
from leaderless.run.planned_run import plan_training
from leaderless.run.run import Run
from leaderless.worker.build.memory_bounds import read_limits

LAYOUT = typer.Option("--layout", metavar="auto", help="auto: choose all layouts by measured seconds.")


def with_layout(overrides: list[str] | None, layout: str) -> list[str]:
    """Settings of a command line, `--layout` among them."""
    if layout not in {"", "auto"}:
        raise typer.BadParameter(f"is '{layout}', but can only be auto; give layouts as layout.NODE.ranks=0-3")
    return [*(overrides or []), *(["layout=auto"] if layout else [])]


def plan(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers to plan for.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the graph into this SVG file.")] = None,
    layout: Annotated[str, LAYOUT] = "",
    memory: Annotated[
        float | None, typer.Option(min=1, help="GiB of each accelerator, to show what fits into them.")
    ] = None,
) -> None:
    """Show what every worker would do, what they would send, and the memory it takes; start nothing."""
    if picture is not None and not picture.parent.is_dir():
        raise typer.BadParameter(f"folder {picture.parent} does not exist: make it first", param_hint="--picture")
    run = Run(target, *with_layout(overrides, layout))
    whole = plan_training(run.loaded, world_size)
    planned, fitted = whole.plan, None
    if memory is not None:
        from leaderless.planner.show.fit import Fitted

        fitted = Fitted.of(whole.recipe, planned, memory)
        planned = fitted.plan
    if picture is not None:
        try:
            from leaderless.planner.show.picture import draw_plan

            write_atomically(picture, draw_plan(planned))
        except OSError as error:
            message = f"{picture} cannot be written: {error.strerror}"
            raise typer.BadParameter(message, param_hint="--picture") from error
        except ModuleNotFoundError as error:
            message = f"a picture needs {error.name}, which is not installed: pip install {error.name}"
            raise typer.BadParameter(message, param_hint="--picture") from error
    if as_json:
        chosen = {} if whole.choice is None else {"placement": choice_to_json(whole.choice)}
        print_json(planned.to_json() | chosen | ({} if fitted is None else {"fit": fitted.to_json()}))
    else:
        from leaderless.planner.graph.judges import judge_lines
        from leaderless.planner.show.text import door_lines, print_plan

        lowered = read_limits(run.directory) if planned.batch.adapts_to_memory else {}
        recipe = whole.recipe
        print_plan(planned, console, lowered, door_lines(recipe, planned), judge_lines(recipe, planned))
        if fitted is not None:
            fitted.print(console)
        if whole.choice is not None:
            print_choice(whole.choice, console)
    if picture is not None and not as_json:
        print_path("picture", picture)


def schema() -> None:
    """Print the JSON Schema of recipes, by which editors complete and check them."""
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()})
