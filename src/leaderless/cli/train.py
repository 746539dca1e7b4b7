"""`leaderless train`."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leaderless.cli.common import Planned, console, plan_recipe, print_line, print_path, recipe_path
from leaderless.config import Problem, Recipe, RecipeError
from leaderless.data.files import find_files
from leaderless.launch.nodes import Nodes
from leaderless.observability.run_directory import RunDirectory
from leaderless.supervision.failure import FOLDER_VARIABLE, STOPPED, tell_launcher
from leaderless.supervision.stop import Interrupted
from leaderless.worker.place import STORE_VARIABLE, Place
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
"""Settings that may change when a run goes on: those that change no number, how long and where it goes on, and what
happens when numbers go bad."""


def train(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers on this machine; 0: one per accelerator, or one.")] = 0,
    fresh: Annotated[bool, typer.Option(help="Set an earlier run of this name aside and begin anew.")] = False,
    nodes: Annotated[
        str | None, typer.Option(metavar="MIN:MAX", help="Train with so many machines; give this command on each.")
    ] = None,
    rendezvous: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where these machines meet.")] = "",
) -> None:
    """Train. A run that was interrupted goes on from its newest checkpoint."""
    place = Place.from_environment()
    num_workers = place.world_size if Place.is_given() else workers or _num_accelerators()
    path, arguments = recipe_path(target), overrides or []
    machines = _machines(nodes, rendezvous, fresh=fresh)
    planned = _plan_for(path, arguments, num_workers, machines)
    if place.rank == 0:
        _check_inputs(planned)
    with _held(planned, place) if machines is None else nullcontext():
        fresh = fresh and not _is_started_again()
        _train(planned, place, ["train", str(path), *arguments], num_workers, machines, fresh=fresh)


def _machines(nodes: str | None, rendezvous: str, *, fresh: bool) -> Nodes | None:
    """The machines that a command line names."""
    if nodes is None and not rendezvous:
        return None
    if Place.is_given():
        raise typer.BadParameter("--nodes and --rendezvous are for `leaderless train` itself, not under torchrun")
    if fresh:
        raise typer.BadParameter("--fresh does not go with --nodes: take another name, or move the run's folder away")
    try:
        return Nodes.parse(nodes or "1", rendezvous)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _plan_for(path: Path, overrides: list[str], num_workers: int, machines: Nodes | None) -> Planned:
    """The plan; where the number of machines may change, for all of them, and it must fit the fewest as well."""
    if machines is None:
        return plan_recipe(path, overrides, num_workers)
    for number in dict.fromkeys((machines.smallest, machines.largest)):
        try:
            planned = plan_recipe(path, overrides, number * num_workers)
        except RecipeError as error:
            note = f" (planned for {number} machines of --nodes with {num_workers} workers each)"
            raise RecipeError(
                [replace(problem, message=problem.message + note) for problem in error.problems]
            ) from error
    return planned


def _is_started_again() -> bool:
    """Whether this worker takes part in a run that is under way, so that what it has written must stay."""
    return FOLDER_VARIABLE in os.environ or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _train(
    planned: Planned, place: Place, arguments: list[str], num_workers: int, machines: Nodes | None, *, fresh: bool
) -> None:
    """Make the run's folder ready, then be a worker or start some."""
    directory = RunDirectory.of(planned.recipe)
    # Every worker looks for itself: none may wait for others that see that there is nothing to do.
    is_finished = not fresh and directory.last_step() >= planned.recipe.steps
    if place.rank == 0 and machines is None:
        _prepare(directory, planned, fresh=fresh)
    if is_finished:
        if place.rank == 0:
            console.print(
                f"[bold]{escape(str(directory.path))}[/] has all of its {planned.recipe.steps} steps: nothing to do. "
                "Raise `steps` to go on, or pass --fresh to begin anew.",
                highlight=False,
                soft_wrap=True,
            )
        return
    if Place.is_given():
        if _work(planned, place) is not None:
            tell_launcher(STOPPED)
        return
    step_before = directory.last_step()
    try:
        _start(planned, arguments, num_workers, machines)
    except (Interrupted, KeyboardInterrupt) as error:
        if directory.last_step() >= planned.recipe.steps:
            return
        if directory.last_step() == step_before:
            goes_on = f": the same command goes on from step {step_before}" if step_before else ""
            console.print(f"stopped before another checkpoint was written{goes_on}", highlight=False, soft_wrap=True)
        raise error if isinstance(error, Interrupted) else Interrupted(signal.SIGINT) from None
    except Exception:
        if directory.last_step():
            console.print(f"saved up to step {directory.last_step()}: the same command goes on from there")
        raise


@contextmanager
def _held(planned: Planned, place: Place) -> Iterator[None]:
    """Keep a second run from writing into the folder of this one."""
    with ExitStack() as stack:
        # Workers that `leaderless train` has started are covered by it.
        if place.rank == 0 and FOLDER_VARIABLE not in os.environ:
            try:
                stack.enter_context(RunDirectory.of(planned.recipe).held())
            except BlockingIOError as error:
                reason = f"is the name of a run that {error} is writing now: take another name, or end that process"
                raise planned.loaded.locate(RecipeError.at("name", reason)) from error
            except OSError:
                pass  # a folder that cannot be written is reported with its reason when it is made ready
        yield


def _start(planned: Planned, arguments: list[str], num_workers: int, machines: Nodes | None) -> None:
    """Train on workers of this machine, or be the only one."""
    if num_workers == 1 and machines is None:
        stopped_by = _work(planned, Place.from_environment())
        if stopped_by is not None:
            raise Interrupted(stopped_by)
        return
    from leaderless.launch.local import Launch, launch_workers
    from leaderless.launch.restarts import Restarts

    directory, run, name = RunDirectory.of(planned.recipe), planned.recipe.run, planned.recipe.name
    # Of several machines, the one with the first worker writes the report.
    with _reporting(directory) if machines is None else nullcontext():
        launch = Launch(arguments, num_workers, directory.logs, run.grace_s, name, machines)
        launch_workers(launch, Restarts(directory, run.max_restarts, print_line))


def _num_accelerators() -> int:
    """Accelerators of this machine, without asking torch where there can be none."""
    patterns = ("nvidia[0-9]*", "davinci[0-9]*", "kfd")
    if not any(True for pattern in patterns for _ in Path("/dev").glob(pattern)):
        return 1
    import torch

    return max(1, torch.accelerator.device_count())


def _work(planned: Planned, place: Place) -> int | None:
    """Be a worker of the run.

    Returns:
        The signal that stopped it before the last step, if one did.
    """
    from leaderless.observability.console import Display
    from leaderless.supervision.failure import reported_failures
    from leaderless.worker.process import train as train_as_worker

    speaks_last = place.rank == 0 and STORE_VARIABLE not in os.environ
    with reported_failures(place.rank):
        display = Display(console, is_shown=place.rank == 0)
        try:
            with _reporting(RunDirectory.of(planned.recipe)) if speaks_last else nullcontext():
                stopped_by = train_as_worker(planned.recipe, planned.plan, place, display)
        except RecipeError as error:
            raise planned.loaded.locate(error) from error
        display.summary(f"{planned.recipe.name}: what has changed")
    return stopped_by


@contextmanager
def _reporting(directory: RunDirectory) -> Iterator[None]:
    """Write the report in the end, also of a run that has failed; that must not hide why it has."""
    try:
        yield
    except BaseException:
        try:
            _report(directory)
        except OSError as error:
            console.print(f"the report could not be written: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise
    _report(directory)


def _report(directory: RunDirectory) -> None:
    """Write the report, if there is anything to report."""
    if not directory.config.exists() or not directory.metrics.exists():
        return
    from leaderless.observability.report import write_report

    print_path("report", write_report(directory.path))


def _prepare(directory: RunDirectory, planned: Planned, *, fresh: bool) -> None:
    """Make the run's folder ready, to begin or to go on."""
    has_checkpoint = directory.last_step() > 0
    if has_checkpoint and not fresh:
        _check_same_settings(directory, planned)
    elif directory.path.exists() and not _is_started_again() and (directory.metrics.exists() or fresh):
        print_path("the earlier run is now in", directory.set_aside(keep_limits=not fresh))
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory.path):
            pass
    except OSError as error:
        reason = f"folder {directory.path} cannot be written: {error.strerror}"
        raise planned.loaded.locate(RecipeError.at("run.directory", reason)) from error


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

    walk("", recipe.model_dump(mode="json"))
    return flat


def _check_inputs(planned: Planned) -> None:
    """What can be seen to be missing without loading anything."""
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
    if problems:
        raise planned.loaded.locate(RecipeError(problems))
    try:
        check_rewards(recipe.reward)
    except RecipeError as error:
        raise planned.loaded.locate(error) from error
