"""The plan that is in force: the recipe's own, or one with another layout that a checkpoint names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from leaderless.config import Recipe, RecipeError
from leaderless.config.layout import LayoutConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Plan
from leaderless.planner.placement.replanning import with_layout

LAYOUT_FILE = "layout.json"
"""File of a checkpoint with the layout that has replaced the recipe's, if one has."""


def replacement_of(plan: Plan, recipe: Recipe) -> str:
    """Note of a checkpoint about a layout that has replaced the recipe's; an empty text if none has."""
    if plan.layout == recipe.layout:
        return ""
    sections = {"recipe": recipe.layout, "in_force": plan.layout}
    facts = {
        name: {node: config.model_dump(mode="json") for node, config in layout.items()}
        for name, layout in sections.items()
    }
    return json.dumps({"world_size": plan.world_size, **facts}, indent=1)


def plan_in_force(checkpoint: Path | None, recipe: Recipe, known: Plan, world: ProcessGroup) -> Plan:
    """The plan to continue a checkpoint with: the one that it was made under. All ranks call it together.

    Where the recipe's `layout` or the number of ranks is another one than then, the recipe's own plan is in force.

    Args:
        checkpoint: Folder of the checkpoint, which only the first rank reads; None without one.
        recipe: Settings of the user.
        known: A plan of this recipe for these ranks.
        world: All ranks.
    """
    is_reader = world.rank == world.ranks[0]
    file = checkpoint / LAYOUT_FILE if checkpoint is not None and is_reader else None
    text = file.read_text(encoding="utf-8") if file is not None and file.exists() else ""
    layout = _layout_in_force(world.broadcast_text(text, world.ranks[0], "the layout that is in force"), recipe, known)
    if layout == known.layout:
        return known
    try:
        return with_layout(recipe, layout, known)
    except RecipeError:  # other settings have changed since
        return with_layout(recipe, recipe.layout, known)


def _layout_in_force(text: str, recipe: Recipe, known: Plan) -> Mapping[str, LayoutConfig]:
    if not text:
        return recipe.layout
    facts = json.loads(text)
    if facts["world_size"] != known.world_size:
        return recipe.layout
    then, in_force = (
        {node: LayoutConfig.model_validate(values) for node, values in facts[name].items()}
        for name in ("recipe", "in_force")
    )
    return in_force if then == recipe.layout else recipe.layout
