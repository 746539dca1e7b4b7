"""`leaderless plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.observability.console import console, print_json, print_path
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.run.planned import plan_recipe
from leaderless.supervision.limits import read_limits


def plan(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers to plan for.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the graph into this SVG file.")] = None,
) -> None:
    """Show what every worker would do, what they would send, and the memory it takes; start nothing."""
    if picture is not None and not picture.parent.is_dir():
        raise typer.BadParameter(f"folder {picture.parent} does not exist: make it first", param_hint="--picture")
    planned = plan_recipe(target, overrides or [], world_size)
    if picture is not None:
        try:
            from leaderless.planner.picture import draw_plan

            write_atomically(picture, draw_plan(planned.plan))
        except OSError as error:
            message = f"{picture} cannot be written: {error.strerror}"
            raise typer.BadParameter(message, param_hint="--picture") from error
        except ModuleNotFoundError as error:
            message = f"a picture needs {error.name}, which is not installed: pip install {error.name}"
            raise typer.BadParameter(message, param_hint="--picture") from error
    if as_json:
        print_json(planned.plan.to_json())
    else:
        from leaderless.planner.show import print_plan

        adapts = planned.plan.batch.adapts_to_memory
        print_plan(planned.plan, console, read_limits(RunDirectory.of(planned.recipe)) if adapts else {})
    if picture is not None and not as_json:
        print_path("picture", picture)
