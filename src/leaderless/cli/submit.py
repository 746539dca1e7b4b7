"""`leaderless submit`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from leaderless.config import RecipeError, nearest
from leaderless.observability.console import errors, print_line, print_path

if TYPE_CHECKING:
    from leaderless.run.clusters.options import TargetOptions
    from leaderless.run.run import Run


def submit(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, as it is named on the machines.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    *,
    to: Annotated[str, typer.Option(help="Scheduler: slurm, kubernetes, ray, or skypilot.")],
    nodes: Annotated[str, typer.Option(metavar="MIN:MAX", help="Number of machines, or a range of numbers.")] = "1",
    workers: Annotated[int, typer.Option(min=1, help="Workers on each machine, one for each accelerator.")] = 8,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the scheduler as key=value. May be given several times.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default named after the run and the scheduler.")
    ] = None,
    go: Annotated[bool, typer.Option("--go", help="Submit the job, too.")] = False,
) -> None:
    """Write the job of a cluster's scheduler that trains on its machines, and with --go submit it."""
    from leaderless.run.clusters.job import ClusterJob
    from leaderless.run.clusters.submit import check_client, submission
    from leaderless.run.clusters.submit import submit as hand_over
    from leaderless.run.run import Run

    options = _options(to, option or [])
    run = Run(target, *(overrides or []))
    bounds = _check_sizes(run, nodes, workers)
    if go:
        check_client(to)
    job = ClusterJob(str(target), overrides or (), run.recipe.name, bounds, workers, run.recipe.run.grace_s, options)
    file = out or Path(job.file_name)
    try:
        file.write_text(job.text(), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}", param_hint="--out") from error
    print_path("job", file)
    command = shlex.join(submission(to, file))
    if not go:
        print_line(f"submit it by: {command}")
    elif code := hand_over(to, file):
        errors.print(f"[red bold]error[/] {escape(command)} ended with exit code {code}; its output above says why")
        raise typer.Exit(1)


def _options(to: str, given: list[str]) -> TargetOptions:
    """The options of a scheduler, checked."""
    from leaderless.config.load import check_section
    from leaderless.config.source import RecipeSource, apply_overrides, with_setting
    from leaderless.run.clusters.options import OPTIONS

    if to not in OPTIONS:
        raise RecipeError.at("", f"--to {to}: unknown scheduler{nearest(to, OPTIONS)}")
    source = RecipeSource({}, {(): f"--to {to}"})
    for option in given:
        key, _, value = option.partition("=")
        field = OPTIONS[to].model_fields.get(key)
        if value and field is not None and field.annotation in {str, str | None}:
            source = with_setting(source, (key,), value, f"--option {option}")  # YAML takes 12:00:00 for a number
        else:
            source = apply_overrides(source, [option])
    return check_section(OPTIONS[to], source)


def _check_sizes(run: Run, nodes: str, workers: int) -> tuple[int, int]:
    """The numbers of machines, for the smallest and largest of which the recipe must have a plan."""
    from leaderless.run.launch.rendezvous import Nodes
    from leaderless.run.planned_run import plan_training

    try:
        machines = Nodes.parse(nodes, "unknown:1")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for number in sorted({machines.smallest, machines.largest}):
        try:
            plan_training(run.loaded, number * workers)
        except RecipeError as error:
            raise error.noted(f" (planned for {number} machines of --nodes with {workers} workers each)") from error
    return machines.smallest, machines.largest
