"""The command `leaderless simulate`, which starts nothing."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leaderless.base.values import Json
from leaderless.cli.plan import LAYOUT, with_layout
from leaderless.config import load_section
from leaderless.config.packaged_files import find_packaged
from leaderless.observability.console import console, print_json
from leaderless.planner.placement.stage_seconds import read_profile
from leaderless.planner.show.placement import print_predicted
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.run.planned_run import located, plan_training
from leaderless.run.run import Run


def simulate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    cluster: Annotated[Path | None, typer.Option(help="File with the constants of the machines.")] = None,
    profile: Annotated[Path | None, typer.Option(help="File with measured seconds instead: a profile.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    world_size: Annotated[str, typer.Option(help="Number of workers; several to compare, as in 64,512.")] = "1",
    prompts_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a step for each worker, in place of batch.prompts_per_step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a list for several numbers.")] = False,
    layout: Annotated[str, LAYOUT] = "",
) -> None:
    """Estimate the time of a step from constants of machines or from measured seconds; start nothing."""
    if (cluster is None) == (profile is None):
        raise typer.BadParameter(
            "give one of --cluster, a file of constants, and --profile, a file of measured seconds"
        )
    sizes, settings = world_sizes(world_size), with_layout(overrides, layout)
    runs: dict[int, Run] = {}
    for size in sizes:
        own = [] if prompts_per_rank is None else [f"batch.prompts_per_step={prompts_per_rank * size}"]
        runs[size] = Run(target, *settings, *own)
    if cluster is not None:
        found = _estimates(runs, load_section(find_packaged(cluster), ClusterConfig), as_json=as_json)
    else:
        assert profile is not None
        found = _predictions(runs, profile, as_json=as_json)
    if as_json:
        print_json(found[0] if len(sizes) == 1 else found)


def world_sizes(text: str) -> list[int]:
    """The numbers of workers that a command line names, such as `1024,16384`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        message = f"is '{text}', but must be a number of workers, or several with commas, as in 64,512"
        raise typer.BadParameter(message, param_hint="--world-size")
    return [int(part) for part in parts]


def _estimates(runs: dict[int, Run], constants: ClusterConfig, *, as_json: bool) -> list[Json]:
    """Estimate a step for each number of workers, and print it; or return all as JSON-able values."""
    from leaderless.planner.show.text import estimate_to_json, print_estimate, print_estimates
    from leaderless.planner.simulate.rows import sample_workload, samplers_of
    from leaderless.planner.simulate.step import estimate_step

    found = []
    for size, run in runs.items():
        whole = plan_training(run.loaded, size)
        with located(run.loaded):
            agents = [node.node.role for node in samplers_of(whole.plan)]
            workload = sample_workload(whole.recipe, constants.workload, agents)
            found.append((whole.plan, estimate_step(whole.plan, whole.recipe, workload, constants)))
    if as_json:
        return [estimate_to_json(plan, estimate, constants) for plan, estimate in found]
    if len(found) == 1:
        print_estimate(*found[0], constants, console)
    else:
        print_estimates(found, constants, console)
    return []


def _predictions(runs: dict[int, Run], profile: Path, *, as_json: bool) -> list[Json]:
    """The same by measured seconds."""
    from leaderless.planner.placement.search import predict_step  # it imports numpy

    found: list[Json] = []
    for size, run in runs.items():
        whole = plan_training(run.loaded, size)
        with located(run.loaded):
            predicted = predict_step(whole.recipe, whole.plan, read_profile(profile))
        if as_json:
            found.append(asdict(predicted))
        else:
            print_predicted(predicted, console, f"{size:,} workers, " if len(runs) > 1 else "")
    return found
