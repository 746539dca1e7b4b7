"""Ranks that exchange with each other in a plan, and the communicators that their accelerators hold for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

from leaderless.planner.entries import RunNode, flat
from leaderless.planner.graph.judges import asking_ranks
from leaderless.planner.layout import Layout
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Loop


def layouts_with_axes(plan: Plan) -> tuple[Layout, ...]:
    """Layouts whose ranks have process groups along axes, in the order in which these are made."""
    layouts = (layout for one in plan.instances for layout in (one.layout, one.serving_layout))
    return tuple(layout for layout in dict.fromkeys(layouts) if layout.peer_groups)


def process_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks of each process group of the main thread, besides all ranks and those along axes, in the same order."""
    found = [plan.ranks_of(action) for action in flat(plan.schedule)]
    found += [*(instance.layout.ranks for instance in plan.instances), *asking_ranks(plan.instances)]
    for loop in plan.loops:
        found += [loop.ranks, *metric_pools(plan, loop)]
    return list(dict.fromkeys(found))


def metric_pools(plan: Plan, loop: Loop) -> Iterator[tuple[int, ...]]:
    """The ranks that add up metrics together: by entry, by shards of a node, and all of the loop."""
    entries = [*flat(loop.schedule)]
    nodes = (plan[action.node].layout.representatives for action in entries if isinstance(action, RunNode))
    yield from dict.fromkeys([*map(plan.ranks_of, entries), *nodes, loop.ranks])


def communicators(plan: Plan) -> Callable[[int], int]:
    """Make a function that counts the communicators of a rank's accelerator: one for each process group of others.

    Ranks that share a device send through host memory, and so does what has a lane of its own.
    """
    helpers, layouts = plan.helpers, layouts_with_axes(plan)

    def is_counted(ranks: tuple[int, ...]) -> bool:
        members = frozenset(ranks) if helpers else frozenset[int]()
        return len(ranks) > 1 and not any(rank in members and owner in members for rank, owner in helpers.items())

    world = tuple(range(plan.world_size))
    together = filter(is_counted, dict.fromkeys([world, *process_groups(plan)]))
    counts = Counter(rank for ranks in together for rank in ranks)

    @cache  # ranks of the same layouts have as many
    def along_axes(own: tuple[int, ...], place: int) -> int:
        forth = {peers(place) for number in own for peers in layouts[number].peer_groups}
        back = {layouts[number].peers(place, "pp") for number in own if layouts[number].pp > 1}
        return sum(map(is_counted, [*forth, *back]))

    first: dict[tuple[int, ...], int] = {}

    def count(rank: int) -> int:
        own = tuple(number for number, layout in enumerate(layouts) if rank in layout)
        return counts[rank] + along_axes(own, first.setdefault(own, rank))

    return count
