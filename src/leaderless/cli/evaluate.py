"""`leaderless eval`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from leaderless.cli.common import Planned, console, errors, print_json, print_line, recipe_path
from leaderless.cli.export import newest_checkpoint
from leaderless.config import LoadedRecipe, RecipeError, load_recipe, nearest
from leaderless.observability.run_directory import RunDirectory, finite_or_none
from leaderless.planner import Cluster, make_plan
from leaderless.rollout.choose import choose_engine
from leaderless.worker.place import Place
from leaderless.workflow.evaluation import evaluation_workflow


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Whose weights; of a run, its newest otherwise.")] = None,
    role: Annotated[str, typer.Option(help="Who answers.")] = "policy",
    workers: Annotated[int, typer.Option(min=1, help="Workers on this machine.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Answer held-out prompts and print mean@k, pass@k and maj@k."""
    place = Place.from_environment()
    num_workers = place.world_size if Place.is_given() else workers
    planned = _plan(load_recipe(recipe_path(target), overrides or []), role, num_workers)
    if checkpoint is not None or target.is_dir():
        checkpoint = newest_checkpoint(checkpoint or target)
    if Place.is_given() or num_workers == 1:
        scores = _work(planned, place, checkpoint)
        if place.rank == 0:
            _print(scores, planned, as_json=as_json)
        return
    from leaderless.launch.local import Launch, launch_workers
    from leaderless.launch.restarts import Restarts

    arguments = ["eval", str(target), *(overrides or []), "--role", role, *(["--json"] if as_json else [])]
    with tempfile.TemporaryDirectory() as logs:
        arguments += ["--checkpoint", str(checkpoint)] if checkpoint else []
        directory, recipe = RunDirectory(Path(logs)), planned.recipe
        launch = Launch(arguments, num_workers, directory.logs, recipe.run.grace_s, recipe.name)
        launch_workers(launch, Restarts(directory, 0, print_line))


def _plan(loaded: LoadedRecipe, role: str, num_workers: int) -> Planned:
    """A plan in which one role answers on all workers, whatever the recipe says of training."""
    recipe = loaded.recipe
    model = recipe.model_of(role)
    try:
        if recipe.data.evaluation is None:
            raise RecipeError.at("data.evaluation", "must name the held-out prompts")
        if not recipe.reward.options():
            raise RecipeError.at("reward", "must name a reward, to tell which responses are correct")
        if model is None:
            raise RecipeError.at("models", f"has no model for the role '{role}'{nearest(role, recipe.models)}")
        batch = recipe.batch.model_copy(update={"prompts_per_step": max(recipe.batch.prompts_per_step, num_workers)})
        recipe = recipe.model_copy(update={"models": {role: model}, "layout": {}, "batch": batch})
        plan = make_plan(recipe, evaluation_workflow(role), Cluster(num_workers, choose_engine(recipe.rollout)))
    except RecipeError as error:
        raise loaded.locate(error) from error
    return Planned(LoadedRecipe(recipe, loaded.source), plan)


def _work(planned: Planned, place: Place, checkpoint: Path | None) -> dict[str, float]:
    """Be a worker of the evaluation."""
    from leaderless.observability.console import Display
    from leaderless.supervision.failure import reported_failures
    from leaderless.worker.process import evaluate as evaluate_as_worker

    with reported_failures(place.rank):
        display = Display(errors, is_shown=place.rank == 0)
        try:
            return evaluate_as_worker(planned.recipe, planned.plan, place, display, checkpoint)
        except RecipeError as error:
            raise planned.loaded.locate(error) from error


def _print(scores: Mapping[str, float], planned: Planned, *, as_json: bool) -> None:
    if as_json:
        print_json(finite_or_none(scores))
        return
    data = planned.recipe.data.evaluation
    assert data is not None
    table = Table(title=f"{planned.recipe.name} on {data.path}", title_justify="left")
    table.add_column("measure")
    table.add_column("score", justify="right")
    for name, value in scores.items():
        table.add_row(name.removeprefix("evaluation/"), f"{value:.0f}" if name.endswith("failed") else f"{value:.4f}")
    console.print(table)
