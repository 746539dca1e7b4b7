"""The folder of a run: made ready before the first step, kept from other runs, and described by a report at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from leaderless.config import Problem, RecipeError
from leaderless.data.files import find_files
from leaderless.observability.console import print_line, print_path
from leaderless.observability.run_directory import RunDirectory
from leaderless.run.planned import Planned, located
from leaderless.run.settings import leaves_of
from leaderless.workflow import load_recipe

FREE_KEYS = (
    "steps",
    "run.",
    "checkpoint.",
    "evaluation.",
    "layout.",
    "batch.micro_batch_tokens",
    "data.prefetch_steps",
    "rollout.max_sequences",
    "guards.",
    "algorithm.loop.",
)
"""Settings that may change when a run continues. They change no number, but how long and where the run continues, and
what happens when numbers go bad."""


@contextmanager
def open_run(
    planned: Planned, *, fresh: bool = False, is_restart: bool = False, is_held: bool = True
) -> Iterator[None]:
    """Prepare a run's folder, and keep other runs out of it.

    Args:
        planned: The run.
        fresh: An earlier run of this name is set aside.
        is_restart: The run is under way, so that what it has written stays.
        is_held: Other processes are kept from the folder.

    Raises:
        RecipeError: Another process writes into the folder, it cannot be written, or it holds a run with other
            settings.
    """
    directory = RunDirectory.of(planned.recipe)
    with ExitStack() as stack:
        if is_held:
            _hold(directory, planned, stack)
        _prepare(directory, planned, fresh=fresh and not is_restart, is_restart=is_restart)
        yield


def is_finished(planned: Planned, *, is_shown: bool = True) -> bool:
    """Whether a run has all of its steps.

    Args:
        planned: The run.
        is_shown: A run that is finished is reported.
    """
    directory, steps = RunDirectory.of(planned.recipe), planned.recipe.steps
    if directory.last_step() < steps:
        return False
    if is_shown:
        advice = "Raise `steps` to continue, or pass --fresh (in Python: fresh=True) to begin anew."
        print_line(f"{directory.path} has all of its {steps} steps: nothing to do. {advice}")
    return True


def check_inputs(planned: Planned) -> None:
    """Check what a recipe names, as far as nothing has to be loaded.

    Args:
        planned: The run.

    Raises:
        RecipeError: A model, a file or a reward is missing or unusable.
    """
    from leaderless.rewards.registry import check_rewards

    recipe = planned.recipe
    problems: list[Problem] = []
    for role, model in recipe.models.items():
        path = Path(model.path)
        if path.is_file():
            problems.append(Problem(f"models.{role}", f"{path} is a file; name the folder that holds config.json"))
        elif path.is_dir() and not (path / "config.json").exists():
            problems.append(Problem(f"models.{role}", f"folder {path} holds no config.json, so it is not a model"))
        elif not path.exists() and (path.is_absolute() or model.path.startswith(".") or len(path.parts) > 2):
            problems.append(Problem(f"models.{role}", f"folder {path} does not exist (looked for from {Path.cwd()})"))
    held_out = {"data.evaluation": recipe.data.evaluation} if recipe.data.evaluation else {}
    for key, dataset in {**recipe.data.train_sets(), **held_out}.items():
        try:
            find_files(dataset, key)
        except RecipeError as error:
            problems += error.problems
    with located(planned.loaded):
        if problems:
            raise RecipeError(problems)
        check_rewards(recipe.reward, in_worker=recipe.run.reward_processes == 0)


@contextmanager
def reporting(directory: RunDirectory) -> Iterator[None]:
    """Write the report at the end, also of a run that fails; a failure to do so must not hide why.

    Args:
        directory: Folder of the run.
    """
    try:
        yield
    except BaseException:
        try:
            _report(directory)
        except OSError as error:
            print_line(f"the report could not be written: {error}")
        raise
    _report(directory)


def _report(directory: RunDirectory) -> None:
    if directory.config.exists() and directory.metrics.exists():
        from leaderless.observability.report import write_report

        print_path("report", write_report(directory.path))


def _hold(directory: RunDirectory, planned: Planned, stack: ExitStack) -> None:
    """Keep a second run from writing into the folder of this one."""
    try:
        stack.enter_context(directory.held())
    except BlockingIOError as error:
        reason = f"is the name of a run that {error} is writing now: take another name, or end that process"
        raise planned.loaded.locate(RecipeError.at("name", reason)) from error
    except OSError:
        pass  # a folder that cannot be written is reported with its reason when it is prepared


def _prepare(directory: RunDirectory, planned: Planned, *, fresh: bool, is_restart: bool) -> None:
    has_checkpoint = directory.last_step() > 0
    if has_checkpoint and not fresh:
        _check_same_settings(directory, planned)
    elif has_checkpoint or (not is_restart and any(record["step"] for record in directory.read_metrics())):
        print_path("the earlier run is now in", directory.set_aside(keep_limits=not fresh))
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        if not has_checkpoint and not is_restart:
            # A run without a step is not kept; what it has noted about itself is not about the new one.
            shutil.rmtree(directory.traces, ignore_errors=True)
            for file in (directory.events, *([directory.limits] if fresh else [])):
                file.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=directory.path):
            pass
    except OSError as error:
        reason = f"folder {directory.path} cannot be written: {error.strerror}"
        raise planned.loaded.locate(RecipeError.at("run.directory", reason)) from error


def _check_same_settings(directory: RunDirectory, planned: Planned) -> None:
    """Refuse to continue a run with other settings than it was begun with."""
    before, now = (
        {".".join(path): value for path, value in leaves_of(recipe.model_dump(mode="json")) if value != {}}
        for recipe in (load_recipe(directory.config).recipe, planned.recipe)
    )
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
