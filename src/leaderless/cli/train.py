"""Commands that start and stop runs: `leaderless train`, `submit` and `stop`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from leaderless.cli.options import (
    ClusterOption,
    LayoutOption,
    OverridesArgument,
    RecipeArgument,
    RendezvousOption,
    RunArgument,
    WorkersOption,
    check_run,
    parse_nodes,
    with_layout,
)
from leaderless.config import RecipeError, nearest
from leaderless.config.load import check_section
from leaderless.config.source import RecipeSource, apply_overrides, with_setting
from leaderless.observability.console import errors, print_line, print_path
from leaderless.observability.run_directory import RunDirectory
from leaderless.run.clusters.options import OPTIONS, TargetOptions
from leaderless.run.launch.rendezvous import Nodes
from leaderless.run.planned_run import plan_machines
from leaderless.run.run import Run
from leaderless.run.stage_profile import num_accelerators
from leaderless.worker.rank_info import RankInfo


def train(  # noqa: PLR0913 - what a user may say of a run
    target: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    workers: WorkersOption = 0,
    fresh: Annotated[bool, typer.Option(help="Set an earlier run of this name aside and begin anew.")] = False,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Numbers of machines to train with; start this command on each."),
    ] = None,
    rendezvous: RendezvousOption = "",
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Train in this process alone, for a debugger; it is not restarted.")
    ] = False,
    layout: LayoutOption = "",
    cluster: ClusterOption = None,
) -> None:
    """Train. A run that was interrupted continues from its newest checkpoint."""
    machines = _machines(nodes, rendezvous, fresh=fresh)
    run = Run(target, *with_layout(overrides, layout, cluster))
    if RankInfo.is_given():
        is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        run.work(RankInfo.from_environment(), fresh=fresh, is_restart=is_restart)
        return
    num_workers = workers or num_accelerators()
    if in_process and (num_workers > 1 or machines is not None):
        raise typer.BadParameter("--in-process is for one worker: give --workers 1, without --nodes")
    # A debugger would not see another process.
    is_debugged = sys.gettrace() is not None or not {"debugpy", "pydevd"}.isdisjoint(sys.modules)
    run.train(num_workers, fresh=fresh, nodes=machines, apart=True, in_process=in_process or is_debugged)


def _machines(nodes: str | None, rendezvous: str, *, fresh: bool) -> Nodes | None:
    """The machines that a command line names."""
    if nodes is None and not rendezvous:
        return None
    if RankInfo.is_given():
        raise typer.BadParameter("--nodes and --rendezvous are for `leaderless train` itself, not under torchrun")
    if fresh:
        raise typer.BadParameter("--fresh does not go with --nodes: take another name, or move the run's folder away")
    return parse_nodes(nodes or "1", rendezvous)


def submit(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, as it is named on the machines.")],
    overrides: OverridesArgument = None,
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
    from leaderless.run.clusters import job as jobs

    options = _options(to, option or [])
    run = Run(target, *(overrides or []))
    machines = parse_nodes(nodes, "unknown:1")
    plan_machines(run.loaded, machines, workers)
    if go:
        jobs.check_client(to)
    name, grace_s, sizes = run.recipe.name, run.recipe.run.grace_s, (machines.smallest, machines.largest)
    job = jobs.ClusterJob(str(target), overrides or (), name, sizes, workers, grace_s, options)
    file = out or Path(job.file_name)
    try:
        file.write_text(job.text(), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}", param_hint="--out") from error
    print_path("job", file)
    command = shlex.join(jobs.submission(to, file))
    if not go:
        print_line(f"submit it by: {command}")
    elif code := jobs.submit(to, file):
        errors.print(f"[red bold]error[/] {escape(command)} ended with exit code {code}; its output above says why")
        raise typer.Exit(1)


def _options(to: str, given: list[str]) -> TargetOptions:
    """The options of a scheduler, checked."""
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


def stop(run: RunArgument) -> None:
    """Ask a run to stop after its present step, with a checkpoint; it may run on another machine."""
    check_run(run)
    RunDirectory(run).stop.touch()
    print_line(f"{run} stops after its present step, with a checkpoint, if it is under way")
