"""`leaderless train`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.common import Planned, console, plan_recipe, recipe_path
from leaderless.config import Problem, Recipe, RecipeError
from leaderless.observability.run_directory import RunDirectory, list_checkpoints
from leaderless.worker.place import Place
from leaderless.workflow import load_recipe

FREE_KEYS = ("steps", "run.", "checkpoint.", "evaluation.", "layout.", "algorithm.loop.")
"""Settings that may change when a run goes on."""


def train(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers on this machine; 0: one per accelerator, or one.")] = 0,
    fresh: Annotated[bool, typer.Option(help="Set an earlier run of this name aside and begin anew.")] = False,
) -> None:
    """Train. A run that was interrupted goes on from its newest checkpoint."""
    place = Place.from_environment()
    num_workers = place.world_size if Place.is_given() else workers or _num_accelerators()
    planned = plan_recipe(recipe_path(target), overrides or [], num_workers)
    directory = RunDirectory.of(planned.recipe)
    if place.rank == 0:
        _check_inputs(planned)
        if not _prepare(directory, planned, fresh=fresh):
            return
    if Place.is_given() or num_workers == 1:
        _work(planned, place)
    else:
        from leaderless.launch.local import launch_workers

        arguments = ["train", str(recipe_path(target)), *(overrides or [])]
        try:
            launch_workers(arguments, num_workers, directory.logs)
        finally:
            _report(directory)


def _num_accelerators() -> int:
    """Accelerators of this machine, without asking torch where there can be none."""
    if not any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/davinci0")):
        return 1
    import torch

    return max(1, torch.accelerator.device_count())


def _work(planned: Planned, place: Place) -> None:
    """Be a worker of the run."""
    from leaderless.observability.console import Display
    from leaderless.worker.failure import reported_failures
    from leaderless.worker.process import train as train_as_worker

    with reported_failures(place.rank):
        display = Display(console, is_shown=place.rank == 0)
        try:
            train_as_worker(planned.recipe, planned.plan, place, display)
        except RecipeError as error:
            raise planned.loaded.locate(error) from error
        finally:
            if place.rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ:
                _report(RunDirectory.of(planned.recipe))
        display.summary(f"{planned.recipe.name}: what has changed")


def _report(directory: RunDirectory) -> None:
    """Write the report, also of a run that has failed."""
    if not directory.config.exists():
        return
    from leaderless.observability.report import write_report

    console.print(f"report: [bold]{write_report(directory.path)}", highlight=False)


def _prepare(directory: RunDirectory, planned: Planned, *, fresh: bool) -> bool:
    """Make the run's folder ready: begin, go on, or see that there is nothing to do.

    Returns:
        Whether there are steps to train.
    """
    checkpoints = list_checkpoints(directory.checkpoints)
    if directory.path.exists() and (fresh or not checkpoints):
        if directory.metrics.exists() or fresh:
            console.print(f"the earlier run is now in [bold]{directory.set_aside()}", highlight=False)
    elif checkpoints:
        _check_same_settings(directory, planned)
        if int(checkpoints[-1].name.removeprefix("step-")) >= planned.recipe.steps:
            console.print(
                f"[bold]{directory.path}[/] has all of its {planned.recipe.steps} steps: nothing to do. "
                "Raise `steps` to go on, or pass --fresh to begin anew.",
                highlight=False,
            )
            return False
    directory.path.mkdir(parents=True, exist_ok=True)
    return True


def _check_same_settings(directory: RunDirectory, planned: Planned) -> None:
    """A run goes on with the settings that it was begun with."""
    before = _flatten(load_recipe(directory.config).recipe)
    now = _flatten(planned.recipe)
    problems = [
        Problem(
            key,
            f"is {now.get(key)!r}, but run '{planned.recipe.name}' was begun with {before.get(key)!r}: "
            "give the new run another name, or pass --fresh to set the old one aside",
        )
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and not key.startswith(FREE_KEYS)
    ]
    if problems:
        raise planned.loaded.locate(RecipeError(problems))


def _flatten(recipe: Recipe) -> dict[str, object]:
    """Settings by dotted name."""
    flat: dict[str, object] = {}

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}{key}.", inner)
        else:
            flat[prefix.removesuffix(".")] = value

    walk("", recipe.model_dump(mode="json", exclude_none=True))
    return flat


def _check_inputs(planned: Planned) -> None:
    """What can be seen to be missing without loading anything."""
    from leaderless.rewards.registry import check_rewards

    recipe = planned.recipe
    problems: list[Problem] = []
    for role, model in recipe.models.items():
        path = Path(model.path)
        if path.is_dir() and not (path / "config.json").exists():
            problems.append(Problem(f"models.{role}", f"folder {path} holds no config.json, so it is not a model"))
        elif not path.exists() and (path.is_absolute() or model.path.startswith(".") or len(path.parts) > 2):
            problems.append(Problem(f"models.{role}", f"folder {path} does not exist (looked for from {Path.cwd()})"))
    for name, dataset in (("train", recipe.data.train), ("evaluation", recipe.data.evaluation)):
        if dataset is not None and dataset.path.endswith((".jsonl", ".parquet")) and not Path(dataset.path).exists():
            problems.append(
                Problem(f"data.{name}.path", f"file {dataset.path} does not exist (looked for from {Path.cwd()})")
            )
    if problems:
        raise planned.loaded.locate(RecipeError(problems))
    try:
        check_rewards(recipe.reward)
    except RecipeError as error:
        raise planned.loaded.locate(error) from error
