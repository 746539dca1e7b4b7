"""Which nodes go through iterations together, and what joins one iteration to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from leaderless.config import Recipe
from leaderless.planner.cuts import Cut, find_cut
from leaderless.planner.edges import bytes_in_flight
from leaderless.planner.entries import Action, Load, Pull, Push, Reshard, RunNode, SyncWeights
from leaderless.planner.layout import all_ranks
from leaderless.planner.parts import Channel, Loop, PlannedNode, RoleInstance
from leaderless.planner.schedule import entries_of, make_schedule, syncs_of, with_history
from leaderless.planner.waits import find_circle


def make_loops(
    recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance], repeated: Sequence[str] = ()
) -> tuple[tuple[Loop, ...], tuple[Channel, ...]]:
    """The loops that nodes form, and their channels.

    The nodes are in order; those named by `repeated` are the first of them.

    Raises:
        RecipeError: A channel of the recipe names no node, has no edge, or cannot work where it is.
    """
    cut = find_cut(recipe, nodes, instances, repeated)
    if cut is None:
        loop = _loop(nodes, make_schedule(recipe, nodes, instances, repeated))
        return (loop,), (_surplus(recipe, loop),) if repeated else ()
    loops, channels = _cut_in_two(recipe, nodes, instances, cut)
    circle = find_circle(loops, channels)
    assert not circle, f"these would wait for each other: {', '.join(circle)}"
    return loops, channels


def with_staleness(
    recipe: Recipe,
    nodes: Sequence[PlannedNode],
    loops: Sequence[Loop],
    channels: Sequence[Channel],
    repeated: Sequence[str],
) -> tuple[PlannedNode, ...]:
    """The same nodes, those behind a channel with what it lets pass; clients' responses may be old before."""
    names = {loop.name: loop.nodes for loop in loops}
    bound = dict[str, int]()
    for channel in channels:
        if channel.kind == "rows":
            # Surplus comes out of the repeated nodes, whose own rows are new.
            bound |= {name: channel.max_staleness for name in names[channel.target] if name not in repeated}
    before = recipe.online.max_staleness if recipe.online is not None else 0
    return tuple(replace(node, max_staleness=before + bound.get(node.name, 0)) for node in nodes)


def _loop(nodes: Sequence[PlannedNode], schedule: Sequence[Action], lag: int = 0) -> Loop:
    ranks = all_ranks(*(node.layout for node in nodes))
    return Loop(nodes[0].name, tuple(node.name for node in nodes), ranks, tuple(schedule), lag)


def _surplus(recipe: Recipe, loop: Loop) -> Channel:
    """What repeated nodes leave over for the next iteration of their own loop.

    Fewer groups are left than an iteration takes, and it takes them first: none waits longer than an iteration.
    """
    updates = recipe.batch.updates_per_step
    return Channel(f"{loop.name}->{loop.name}", "rows", loop.name, loop.name, capacity=1, max_staleness=updates)


def _cut_in_two(
    recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance], cut: Cut
) -> tuple[tuple[Loop, ...], tuple[Channel, ...]]:
    """A loop that generates and a loop that trains, with the rows and weights between them."""
    generating, training = ([node for node in nodes if node.name in part] for part in (cut.generating, cut.training))
    ranks = frozenset(all_ranks(*(node.layout for node in generating)))
    entries, syncs = entries_of(recipe, nodes), syncs_of(instances)
    sent = [
        entry
        for entry in entries
        if isinstance(entry, Reshard) and entry.source in cut.generating and ranks.isdisjoint(entry.target_layout.ranks)
    ]
    own = [entry for entry in entries if entry not in sent]
    before = [entry for entry in own if _first_rank(entry, nodes) in ranks]
    behind = [entry for entry in own if _first_rank(entry, nodes) not in ranks]

    names = generating[0].name, training[0].name
    channel = partial(Channel, capacity=cut.capacity, max_staleness=cut.max_staleness)
    weights = [
        channel(f"{sync.role}=>{_first_user(nodes, sync).name}", "weights", *reversed(names), sync=sync)
        for sync in syncs
        if sync.target_layout.ranks[0] in ranks
    ]
    # What a layout has already when rows arrive depends on all that comes before in the loop that takes them.
    arrives = next(place for place, entry in enumerate(behind) if _takes_rows(entry, nodes, cut))
    behind = with_history(nodes, [*behind[:arrives], *sent, *behind[arrives:]], [])
    arriving, behind[arrives : arrives + len(sent)] = behind[arrives : arrives + len(sent)], []
    reshards = tuple(entry for entry in arriving if isinstance(entry, Reshard))
    size = bytes_in_flight(recipe, nodes, reshards)
    rows = channel("->".join(names), "rows", *names, reshards=reshards, max_bytes=size)
    behind.insert(arrives, Pull(rows.name))
    behind += [sync for sync in syncs if sync.target_layout.ranks[0] not in ranks]
    behind += [Push(one.name) for one in weights]

    done = 1 + max(before.index(RunNode(reshard.source)) for reshard in reshards)
    before = with_history(nodes, before, [])
    before.insert(done, Push(rows.name))
    before[:0] = [Pull(one.name) for one in weights]
    before = [replace(entry, portions=cut.portions) if isinstance(entry, Load) else entry for entry in before]
    ahead = _loop(generating, before, lag=cut.capacity)
    ahead = replace(ahead, is_continuous=cut.is_continuous, stragglers=cut.stragglers, helpers=cut.helpers)
    return (ahead, _loop(training, behind)), (rows, *weights)


def _first_rank(entry: Action, nodes: Sequence[PlannedNode]) -> int:
    """A rank that an entry begins on."""
    match entry:
        case RunNode(name):
            return next(node for node in nodes if node.name == name).layout.ranks[0]
        case Load(layout, _) | Reshard(source_layout=layout):
            return layout.ranks[0]
        case _:
            raise AssertionError(f"{entry} is no part of a plan with channels")


def _takes_rows(entry: Action, nodes: Sequence[PlannedNode], cut: Cut) -> bool:
    """Whether an entry runs a node that works on rows, or reads columns, of the loop that generates."""
    node = next((node for node in nodes if entry == RunNode(node.name)), None)
    return node is not None and not cut.generating.isdisjoint({node.row_set, *node.reads.values()})


def _first_user(nodes: Sequence[PlannedNode], sync: SyncWeights) -> PlannedNode:
    """The first node that uses a copy of a role's weights."""
    return next(node for node in nodes if node.node.role == sync.role and node.layout == sync.target_layout)
