"""Which nodes go through iterations together, what joins one iteration to another, and what goes between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from leaderless.config import Recipe
from leaderless.planner.entries import Action, Load, Pull, Push, Reshard, RunNode
from leaderless.planner.graph.async_split import Cut, find_cut
from leaderless.planner.graph.row_sets import DATA
from leaderless.planner.graph.schedule import entries_of, is_expanded, make_schedule, syncs_of, with_history
from leaderless.planner.layout import all_ranks
from leaderless.planner.plan_parts import Channel, Edge, EdgeKind, Loop, PlannedNode, RoleInstance
from leaderless.planner.workflow.columns import EXPERTS_PER_TOKEN, IMAGE_BYTES_PER_TOKEN, SUPPORT_PER_TOKEN, column_of


@dataclass(frozen=True)
class Wait:
    """An event that waits for another one, some iterations before it; an event is a loop and one of its entries.

    Each entry of a loop is an event of every iteration. An event waits for others: an entry for the one before it, the
    first of an iteration for the last of the iteration before; a pull for the push of what it takes; and a push, as at
    most `capacity` iterations may be in flight, for the pull of an earlier one. An event of iteration k waits for one
    of iteration k - delay. If the delays along every circle of waits add up to at least 1, no event waits for itself or
    for its own future, so some rank can always continue. `docs/architecture.md` has the argument in full.
    """

    event: tuple[str, str]
    awaited: tuple[str, str]
    delay: int


def lag_of(channel: Channel, loops: Sequence[Loop]) -> int:
    """Iterations between the one that puts something into a channel and the one that takes it out.

    Rows are trained in the iteration of the same number, surplus in the next. Weights are used in the first iteration
    that training with lag 0 would use them in, and as many later as the loop is ahead.
    """
    if channel.source == channel.target:
        return 1
    if channel.kind == "rows":
        return 0
    return 1 + next(loop.lag for loop in loops if loop.name == channel.target)


def waits_of(loops: Sequence[Loop], channels: Sequence[Channel]) -> Iterator[Wait]:
    """All waits of the loops' pushes and pulls; entries between them wait for nothing outside their loop.

    A channel without capacity is a meeting: either end waits for all that comes before the other.
    """
    before: dict[tuple[str, str], tuple[tuple[str, str], int]] = {}
    for loop in loops:
        events = [(loop.name, str(entry)) for entry in loop.schedule if isinstance(entry, Push | Pull)]
        for place, event in enumerate(events):
            before[event] = events[place - 1], 0 if place else 1
            yield Wait(event, *before[event])
    for channel in channels:
        push = channel.source, str(Push(channel.name))
        pull = channel.target, str(Pull(channel.name))
        if push not in before or pull not in before:
            continue  # surplus stays on its ranks
        lag = lag_of(channel, loops)
        if channel.capacity:
            yield Wait(pull, push, lag)
            yield Wait(push, pull, channel.capacity - lag)
        else:
            (before_push, first), (before_pull, second) = before[push], before[pull]
            yield Wait(pull, before_push, lag + first)
            yield Wait(push, before_pull, second - lag)


def find_circle(loops: Sequence[Loop], channels: Sequence[Channel]) -> tuple[str, ...]:
    """Events that wait for each other in a circle, by name; empty if there are none, and the ranks cannot deadlock."""
    waits = list(waits_of(loops, channels))
    events = list(dict.fromkeys(wait.event for wait in waits))
    # Bellman-Ford: a circle of at most `len(events)` waits has a negative cost if its delays add up to 0 or less.
    cost = dict.fromkeys(events, 0)
    via: dict[tuple[str, str], tuple[str, str]] = {}
    changed: tuple[str, str] | None = None
    for _ in range(len(events) + 1):
        changed = None
        for wait in waits:
            reached = cost[wait.awaited] + wait.delay * (len(events) + 1) - 1
            if reached < cost[wait.event]:
                cost[wait.event], via[wait.event], changed = reached, wait.awaited, wait.event
        if changed is None:
            return ()
    assert changed is not None, "costs that still change have a circle"
    for _ in events:  # from any event behind a circle back into it
        changed = via[changed]
    circle = [changed]
    while via[circle[-1]] != changed:
        circle.append(via[circle[-1]])
    return tuple(f"{name}: {entry}" for name, entry in circle)


def make_loops(
    recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance], repeated: Sequence[str] = ()
) -> tuple[tuple[Loop, ...], tuple[Channel, ...]]:
    """The loops that nodes form, and their channels. The nodes are in order, and begin with the `repeated` ones."""
    cut = find_cut(recipe, nodes, instances, repeated)
    if cut is None:
        loop = _loop(nodes, make_schedule(recipe, nodes, instances, repeated))
        # Repeated nodes leave groups for the next iteration of their own loop: fewer than it takes, and it takes them
        # first, so that none waits longer than an iteration.
        surplus = Channel(f"{loop.name}->{loop.name}", "rows", loop.name, loop.name, 1, recipe.batch.updates_per_step)
        return (loop,), (surplus,) if repeated else ()
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
    config = cut.config
    channel = partial(Channel, capacity=config.capacity, max_staleness=cut.max_staleness)
    weights = [
        channel(f"{sync.role}=>{user.name}", "weights", *reversed(names), sync=sync)
        for sync in syncs
        if sync.target_layout.ranks[0] in ranks
        for user in [next(x for x in nodes if x.node.role == sync.role and x.layout == sync.target_layout)]
    ]
    # What a layout has already when rows arrive depends on all that comes before in the loop that takes them.
    taking = {RunNode(x.name) for x in nodes if not cut.generating.isdisjoint({x.row_set, *x.reads.values()})}
    arrives = next(place for place, entry in enumerate(behind) if entry in taking)
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
    portions = tuple(config.portions)
    before = [replace(entry, portions=portions) if isinstance(entry, Load) else entry for entry in before]
    ahead = replace(
        _loop(generating, before, lag=config.capacity),
        is_continuous=cut.is_continuous,
        stragglers=config.stragglers,
        helpers=tuple(sorted(config.helpers.items())),
    )
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


def edges_of(recipe: Recipe, nodes: Sequence[PlannedNode], loops: Sequence[Loop]) -> tuple[Edge, ...]:
    """The columns between nodes, by reader and the node that it reads from."""
    layouts = {node.name: node.layout for node in nodes}
    loop_of = {name: loop.name for loop in loops for name in loop.nodes}
    edges: list[Edge] = []
    for node in nodes:
        is_sampled = is_expanded(nodes, node.row_set)
        for source in sorted(set(node.reads.values())):
            columns = tuple(column for column, provider in node.reads.items() if provider == source)
            kind: EdgeKind = "channel" if loop_of.get(source, loop_of[node.name]) != loop_of[node.name] else "reshard"
            if source == DATA or layouts[source].holds_rows_like(node.layout):
                kind = "local"
            size = sum(_max_bytes(recipe, column, node.node.agents, is_sampled=is_sampled) for column in columns)
            edges.append(Edge(source, node.name, columns, kind, size))
    return tuple(edges)


def bytes_in_flight(recipe: Recipe, nodes: Sequence[PlannedNode], reshards: Sequence[Reshard]) -> int:
    """Most bytes that a rank holds of one iteration's rows, every sequence as long as it may be.

    A column is held once, however many layouts it is sent to.
    """
    held: dict[tuple[str, str], int] = {}
    for reshard in reshards:
        source = next(node for node in nodes if node.name == reshard.source)
        is_sampled = is_expanded(nodes, reshard.row_set)
        for column in reshard.columns:
            size = _max_bytes(recipe, column, source.node.agents, is_sampled=is_sampled)
            held[reshard.source, column] = -(-size // reshard.source_layout.dp)
    return sum(held.values())


def _max_bytes(recipe: Recipe, name: str, agents: Sequence[str], *, is_sampled: bool) -> int:
    """Bytes of a column over all ranks, every sequence as long as it may be."""
    column, data, batch = column_of(name), recipe.data, recipe.batch
    response = recipe.longest_response(agents) if is_sampled else data.max_response_tokens
    longest = {
        None: 1,
        "prompt_tokens": data.max_prompt_tokens,
        "image_bytes": data.max_prompt_tokens * IMAGE_BYTES_PER_TOKEN,
        "later_image_bytes": response * IMAGE_BYTES_PER_TOKEN,
        "experts": (data.max_prompt_tokens + response) * EXPERTS_PER_TOKEN,
        "support": response * SUPPORT_PER_TOKEN,
        "teacher": response * (1 + (recipe.algorithm.distillation.top_k or 0)),
    }.get(column.axis, response)
    siblings = batch.responses_per_prompt * max(1, len(agents)) if is_sampled and not column.is_prompt else 1
    return batch.prompts_per_step * siblings * longest * column.item_bytes
