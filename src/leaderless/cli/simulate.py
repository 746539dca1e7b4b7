"""`leaderless simulate`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leaderless.cli.common import plan_recipe, recipe_path
from leaderless.config import LoadedRecipe, Recipe, RecipeError
from leaderless.observability.console import console, errors, print_path
from leaderless.planner import Plan
from leaderless.workflow import load_recipe

if TYPE_CHECKING:
    from leaderless.planner.costs.cluster import ClusterConfig
    from leaderless.planner.costs.sweep import PlanFor, Point, Settings, Sweep


def simulate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    cluster: Annotated[Path, typer.Option(help="File with the constants of the machines.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    world_size: Annotated[str, typer.Option(help="Numbers of workers, as 8,64,512.")] = "1",
    prompts: Annotated[str | None, typer.Option(help="Prompts of a step, as 1024,4096.")] = None,
    prompts_per_rank: Annotated[int | None, typer.Option(min=1, help="Prompts of a step for each worker.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of prompt and response, as 8192,65536.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for charts and numbers.")] = None,
) -> None:
    """Estimate what a step would take on machines that a file describes; start nothing.

    Of workers, prompts and context one may have several values; what is not given is as the recipe says.
    """
    from leaderless.planner.costs.cluster import load_cluster
    from leaderless.planner.costs.show import print_sweep
    from leaderless.planner.costs.sweep import Sweep, settings_of

    sizes = _numbers("--world-size", world_size)
    batches = [] if prompts is None else _numbers("--prompts", prompts)
    contexts = [] if context is None else _numbers("--context", context)
    path, given = recipe_path(target), overrides or []
    constants, loaded = load_cluster(cluster), load_recipe(path, given)

    def plan_for(more: Sequence[str], num_ranks: int) -> tuple[Recipe, Plan]:
        planned = plan_recipe(path, [*given, *more], num_ranks)
        return planned.recipe, planned.plan

    try:
        axis, settings = settings_of(loaded.recipe, sizes, batches, contexts, prompts_per_rank)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"folder {out} cannot be made: {error.strerror}: name another"
            raise typer.BadParameter(message, param_hint="--out") from error
    sweep = Sweep(loaded.recipe.name, constants, axis, _simulate(settings, plan_for, constants, loaded))
    print_sweep(sweep, console)
    if out is not None:
        _write(sweep, out)


def _numbers(option: str, text: str) -> list[int]:
    """The values of an option that takes several."""
    parts = [part.strip() for part in text.split(",")]
    wrong = next((part for part in parts if not part.isdecimal() or int(part) < 1), None)
    if wrong is not None:
        raise typer.BadParameter(
            f"{wrong!r} in '{text}' is no whole number above 0: write 8 or 8,64", param_hint=option
        )
    numbers = [int(part) for part in parts]
    if numbers != sorted(set(numbers)):
        raise typer.BadParameter(f"'{text}' does not ascend: write each value once, in order", param_hint=option)
    return numbers


def _simulate(
    settings: Sequence[Settings], plan_for: PlanFor, cluster: ClusterConfig, loaded: LoadedRecipe
) -> tuple[Point, ...]:
    """Simulate every point, with a bar where somebody watches."""
    from leaderless.planner.costs.sweep import simulate as simulate_points

    columns = (TextColumn("simulated"), MofNCompleteColumn(), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        points = progress.track(simulate_points(settings, plan_for, cluster), total=len(settings))
        try:
            return tuple(points)
        except RecipeError as error:
            raise loaded.locate(error) from error


def _write(sweep: Sweep, folder: Path) -> None:
    """Write numbers and charts, and say where they are."""
    from leaderless.observability.run_directory import write_atomically
    from leaderless.planner.costs.charts import draw_png, write_page

    numbers, page, picture = (folder / f"simulation.{suffix}" for suffix in ("json", "html", "png"))
    write_atomically(numbers, json.dumps(sweep.to_json(), indent=1) + "\n")
    write_page(sweep, page)
    written = {"numbers": numbers, "page": page}
    if importlib.util.find_spec("matplotlib") is not None:
        draw_png(sweep, picture)
        written["picture"] = picture
    for label, path in written.items():
        print_path(label, path)
