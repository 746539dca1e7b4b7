"""Where clients of an online run ask, as far as a plan knows it."""

from __future__ import annotations

from leaderless.config import Recipe
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import PlannedNode


def sampling_node(recipe: Recipe, plan: Plan) -> PlannedNode | None:
    """The node that clients ask; None if the recipe has none."""
    if recipe.online is None:
        return None
    return next(node for node in plan.nodes if node.spec.samples)


def door_lines(recipe: Recipe, plan: Plan) -> list[tuple[str, str]]:
    """Rank and address of each replica that clients ask."""
    node, config = sampling_node(recipe, plan), recipe.online
    if node is None or config is None:
        return []
    ports = ["any free port" if not config.port else str(config.port + place) for place in range(node.layout.dp)]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return [
        (f"rank {rank}", f"http://{host}:{port}/v1" if config.port else f"{host}, {port}")
        for rank, port in zip(node.layout.representatives, ports, strict=True)
    ]
