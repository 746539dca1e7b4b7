"""Plans for a run that is under way."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.config import Recipe
from leaderless.config.layout import LayoutConfig
from leaderless.planner.layout import Cluster
from leaderless.planner.make_plan import make_plan
from leaderless.planner.plan import Plan
from leaderless.workflow import resolve_workflow


def with_layout(recipe: Recipe, layout: Mapping[str, LayoutConfig], like: Plan) -> Plan:
    """Plan a recipe with another section `layout`, for the cluster of another plan of it.

    Raises:
        RecipeError: The layout does not fit.
    """
    cluster = Cluster(like.world_size, like.engine)
    return make_plan(recipe.model_copy(update={"layout": layout}), resolve_workflow(recipe.workflow), cluster)
