"""Which nodes go through iterations together, and what joins one iteration to another."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.config import Recipe
from leaderless.planner.layout import all_ranks
from leaderless.planner.plan import Channel, Loop, PlannedNode, RoleInstance
from leaderless.planner.schedule import make_schedule


def make_loops(
    recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance], repeated: Sequence[str] = ()
) -> tuple[tuple[Loop, ...], tuple[Channel, ...]]:
    """The loops that nodes form, and their channels.

    The nodes are in order; those named by `repeated` are the first of them.
    """
    loop = Loop(
        name=nodes[0].name,
        nodes=tuple(node.name for node in nodes),
        ranks=all_ranks(*(node.layout for node in nodes)),
        schedule=make_schedule(recipe, nodes, instances, repeated),
    )
    return (loop,), (_surplus(recipe, loop),) if repeated else ()


def _surplus(recipe: Recipe, loop: Loop) -> Channel:
    """What repeated nodes leave over for the next iteration of their own loop.

    Fewer groups are left than an iteration takes, and it takes them first: none waits longer than an iteration.
    """
    updates = recipe.batch.updates_per_step
    return Channel(f"{loop.name}->{loop.name}", "rows", loop.name, loop.name, capacity=1, max_staleness=updates)
