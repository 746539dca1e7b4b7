"""`leaderless simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.config import RecipeError, load_section
from leaderless.observability.console import console, print_json
from leaderless.run.planned import plan_recipe


def simulate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, or the folder of a run.")],
    cluster: Annotated[Path, typer.Option(help="File with the constants of the machines.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate the time of a step on machines that a file describes; start nothing."""
    from leaderless.planner.costs.cluster import ClusterConfig
    from leaderless.planner.costs.rows import sample_workload
    from leaderless.planner.costs.step import estimate_step
    from leaderless.planner.show import estimate_to_json, print_estimate

    constants = load_section(cluster, ClusterConfig)
    planned = plan_recipe(target, overrides or [], world_size)
    recipe, plan = planned.recipe, planned.plan
    try:
        estimate = estimate_step(plan, recipe, sample_workload(recipe, constants.workload), constants)
    except RecipeError as error:
        raise planned.loaded.locate(error) from error
    if as_json:
        print_json(estimate_to_json(plan, estimate, constants))
    else:
        print_estimate(plan, estimate, constants, console)
