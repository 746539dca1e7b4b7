"""`leaderless profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.cli.train import num_accelerators
from leaderless.observability.console import console, print_path
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner.placement.stage_seconds import Profile
from leaderless.run.planned_run import located, plan_training
from leaderless.run.run import Run
from leaderless.run.stage_profile import Spans, measure, profile_of


def profile(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Workers on this machine; 0: one per accelerator, or one.")] = 0,
    earlier: Annotated[
        Path | None, typer.Option("--from", help="Folder of a run whose traces are read; nothing is started.")
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("profile.json"),
) -> None:
    """Measure the seconds of each stage, in some short runs; `layout: auto` chooses layouts by them."""
    run = Run(target, *(overrides or []))
    if earlier is None:
        with located(run.loaded):
            found = measure(run.recipe, target, overrides or [], workers or num_accelerators())
    else:
        found = _of_run(earlier)
    write_atomically(output, found.model_dump_json(indent=1) + "\n")
    for name, law in found.stages.items():
        parts = (
            f"{law.fixed_s:.3g} s + {law.row_s:.3g} s/row + {law.token_s:.3g} s/token + {law.longest_s:.3g} s/longest"
        )
        parts += " + waits of episodes" * law.waits
        console.print(f"{name}: {parts} ±{law.error:.0%}", highlight=False)
    print_path("profile", output)


def _of_run(folder: Path) -> Profile:
    """The profile that the traces of a run give."""
    if not (folder / "config.yaml").exists():
        raise typer.BadParameter(f"{folder} holds no config.yaml, so it is no folder of a run", param_hint="--from")
    run, directory = Run(folder), RunDirectory(folder)
    workers = len(list(directory.traces.glob("rank-*.json"))) or 1
    with located(run.loaded):
        spans = Spans()
        spans.add(directory, plan_training(run.loaded, workers).plan)
        return profile_of(spans, run.recipe, workers)
