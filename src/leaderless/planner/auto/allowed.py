"""What a recipe lets the planner choose, and what it could not do anyway."""

from __future__ import annotations

from typing import Literal

from leaderless.config import Recipe, RecipeError
from leaderless.planner.auto.candidates import Allowed, Candidate
from leaderless.planner.engines import engine_of
from leaderless.planner.layout import Cluster
from leaderless.planner.make_plan import make_plan
from leaderless.planner.plan import Plan
from leaderless.workflow import Workflow


def allowed_by(recipe: Recipe, base: Plan) -> Allowed:
    """What a recipe lets the planner choose: it keeps the channels and windows that it sets itself.

    Raises:
        RecipeError: Continuous generation is allowed, but not to be an iteration ahead; or there are helpers next to
            channels of the recipe's own.
    """
    placement = recipe.placement
    if placement is None:
        return Allowed()
    max_windows = placement.max_windows if recipe.batch.windows_per_step == 1 else 1
    if recipe.open_channels and placement.helpers:
        raise RecipeError.at(
            "placement.helpers",
            f"is {placement.helpers}, but the recipe has channels of its own, which say who helps: leave one of the "
            "two out",
        )
    if recipe.open_channels:
        return Allowed(max_windows=max_windows)
    max_ahead = placement.max_ahead(recipe.batch.updates_per_step)
    if placement.continuous and not max_ahead:
        raise RecipeError.at(
            "placement.max_staleness",
            f"is {placement.max_staleness}, but with batch.updates_per_step={recipe.batch.updates_per_step} rows of an "
            f"iteration ahead are older: set at least {recipe.batch.updates_per_step}, or leave continuous out",
        )
    engines = [instance.engine for instance in base.instances if instance.generates]
    keeps = all("keep" in engine_of(engine).updates for engine in engines)
    cache: Literal["keep", "recompute"] = "keep" if keeps else "recompute"
    return Allowed(placement.max_lag, max_windows, (), max_ahead, cache, placement.helpers)


def without_impossible(
    candidates: list[Candidate], plain: Recipe, workflow: Workflow, cluster: Cluster
) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """The candidates without those that generate continuously, and why, if this recipe cannot do so."""
    first = next((one for one in candidates if one.cache), None)
    if first is None:
        return candidates, []
    try:
        make_plan(plain.model_copy(update={"layout": first.layout, "channels": first.channels}), workflow, cluster)
    except RecipeError as error:
        problem = error.problems[0]
        if problem.key.startswith("channels."):
            return [one for one in candidates if not one.cache], [(first, str(error))]
    return candidates, []


def nothing_to_choose(allowed: Allowed, cluster: Cluster) -> RecipeError:
    """Why helpers leave nothing to choose."""
    return RecipeError.at(
        "placement.helpers",
        f"is {allowed.helpers}, but it leaves {cluster.world_size - allowed.helpers} of {cluster.world_size} workers a "
        f"device, of which one must generate, and {allowed.helpers} train, in a workflow with one node that generates: "
        f"start at least {2 * allowed.helpers + 1} workers with as "
        "many prompts or more, or leave helpers out",
    )
