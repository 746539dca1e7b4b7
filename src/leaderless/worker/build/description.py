"""Description of a run in its folder: its recipe and its plan."""

from __future__ import annotations

import json
from collections.abc import Callable

from leaderless.config import Recipe, dump_recipe
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner import Plan


def write_description(directory: RunDirectory, recipe: Recipe, plan: Plan, say: Callable[[str], None]) -> None:
    """Write the resolved recipe, the plan and its picture to the folder of the run."""
    write_atomically(directory.config, dump_recipe(recipe))
    write_atomically(directory.plan, json.dumps(plan.to_json(), indent=1))
    try:
        from leaderless.planner.show.picture import draw_plan
    except ModuleNotFoundError as error:
        say(f"the plan is not drawn: {error.name} is not installed")
    else:
        write_atomically(directory.picture, draw_plan(plan))
