"""The order of all chain entries: loads, nodes, reshards, weights.

    turn         1           2           3           4
    rollout      window 1    window 2    window 3                  delay 0
    reshard      window 1    window 2    window 3                  delay 0, in the background
    reward                   window 1    window 2    window 3      delay 1, on other ranks

A step that is divided into windows takes turns like these, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from leaderless.config import Recipe
from leaderless.planner.entries import (
    QUADRATIC_TOKENS,
    Action,
    Load,
    Repeat,
    Reshard,
    RunNode,
    SyncWeights,
    Windowed,
)
from leaderless.planner.graph.row_sets import DATA
from leaderless.planner.layout import Layout, all_ranks
from leaderless.planner.plan_parts import PlannedNode, RoleInstance


def make_schedule(
    recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance], repeated: Sequence[str] = ()
) -> tuple[Action, ...]:
    """All chain entries in one order. Every rank keeps it, so no two ranks wait for each other.

    The nodes are in order; those named by `repeated` are the first of them.
    """
    schedule = entries_of(recipe, nodes)
    if repeated:
        # The body ends with the node itself: what it sends waits until all rounds are done.
        done = 1 + schedule.index(RunNode(repeated[-1]))
        schedule[:done] = [_repeat(recipe, nodes, schedule[:done])]
    else:
        schedule = _in_windows(nodes, schedule, recipe.batch.windows_per_step)
    return (*with_history(nodes, schedule, []), *syncs_of(instances))


def entries_of(recipe: Recipe, nodes: Sequence[PlannedNode]) -> list[Action]:
    """The loads, nodes and reshards of an iteration, each node followed by what is sent of its columns."""
    entries: list[Action] = list(_loads(recipe, nodes))
    for node in nodes:
        # Columns leave right after their node, so that readers on other ranks can begin. The order is the same on all
        # ranks: no two wait for each other crosswise.
        entries += [RunNode(node.name), *_reshards(recipe, nodes, node)]
    return entries


def syncs_of(instances: Sequence[RoleInstance]) -> list[SyncWeights]:
    """New weights of each trained role to every other instance of it."""
    return [
        SyncWeights(trained.role, trained.layout, serving.layout)
        for trained in instances
        for serving in instances
        if trained.is_trained and serving.role == trained.role and not serving.is_trained
    ]


def delays_of(nodes: Sequence[PlannedNode]) -> dict[str, int]:
    """Windows that each node is behind the first, for nodes that can work on a window while others are on their way.

    A node can if its stage can, and so can all nodes that it gets rows or columns from. A reshard takes as long as a
    window, so that it runs in the background meanwhile. Nodes that only add to the data's own rows are not among them:
    each layout loads those by itself, in windows of its own.
    """
    delays: dict[str, int] = {}
    layouts = {node.name: node.layout for node in nodes}
    for node in nodes:
        sources = {node.row_set, *node.reads.values()} - {DATA}
        if node.spec.streams and node.row_set_after != DATA and sources <= delays.keys():
            # A window behind the slowest source, and one more where its rows first have to come from another layout.
            delays[node.name] = max(
                (delays[name] + (not layouts[name].holds_rows_like(node.layout)) for name in sources), default=0
            )
    return delays


def _in_windows(nodes: Sequence[PlannedNode], schedule: Sequence[Action], num_windows: int) -> list[Action]:
    """The same schedule, with one entry that walks nodes window by window if any rows change ranks among these."""
    delays, layouts = delays_of(nodes), {node.name: node.layout for node in nodes}
    sources = {a: a.node if isinstance(a, RunNode) else a.source for a in schedule if isinstance(a, RunNode | Reshard)}
    # A reshard is as far behind as the node whose columns it sends.
    behind = {action: delays[source] for action, source in sources.items() if source in delays}
    # Windows only pay where rows are on their way while others are worked on.
    if num_windows == 1 or not any(isinstance(action, Reshard) for action in behind):
        return list(schedule)
    ranks = {r for a in behind for r in (layouts[a.node].ranks if isinstance(a, RunNode) else a.ranks)}
    # They all come where the first of them was. A node in windows reads only from the data and from others in windows,
    # so that nothing between them has to come first.
    first = next(place for place, action in enumerate(schedule) if action in behind)
    windowed = Windowed(tuple(behind), tuple(behind.values()), num_windows, tuple(sorted(ranks)))
    return [*schedule[:first], windowed, *(action for action in schedule[first:] if action not in behind)]


def makers(nodes: Sequence[PlannedNode], row_set: str) -> list[PlannedNode]:
    """The nodes that put rows into a row set; several for one that joins rows."""
    return [node for node in nodes if node.row_set_after == row_set and node.spec.rows != "same"]


def is_expanded(nodes: Sequence[PlannedNode], row_set: str) -> bool:
    """Whether the rows of a row set are samples, not prompts."""
    made = makers(nodes, row_set)
    return any(maker.spec.rows == "expand" or is_expanded(nodes, maker.row_set) for maker in made)


def _repeat(recipe: Recipe, nodes: Sequence[PlannedNode], body: Sequence[Action]) -> Repeat:
    """A repetition of some entries. Reshards of its last node's output follow it."""
    names = [action.node for action in body if isinstance(action, RunNode)]
    layouts = [node.layout for node in nodes if node.name in names]
    return Repeat(
        nodes=tuple(names),
        layout=layouts[-1],
        ranks=all_ranks(*layouts),
        num_groups=recipe.batch.prompts_per_step,
        max_rounds=recipe.algorithm.repeat.max_rounds,
        body=tuple(body),
    )


def _loads(recipe: Recipe, nodes: Sequence[PlannedNode]) -> list[Load]:
    """One load for every layout that works on the data's own rows."""
    groups = peers_of(node for node in nodes if node.row_set == DATA)
    are_divided = recipe.batch.parts_per_step > 1
    return [
        Load(layout, _columns_from(DATA, peers), in_turns=are_divided and _are_trained(nodes, DATA, layout))
        for layout, peers in ((peers[0].layout, peers) for peers in groups)
    ]


def peers_of(nodes: Iterable[PlannedNode]) -> list[list[PlannedNode]]:
    """Nodes in groups whose layouts hold the same rows, both in order."""
    groups: dict[object, list[PlannedNode]] = {}
    for node in nodes:
        groups.setdefault(node.layout.row_key, []).append(node)
    return list(groups.values())


def _columns_from(source: str, readers: Sequence[PlannedNode]) -> tuple[str, ...]:
    return tuple(sorted({column for node in readers for column, name in node.reads.items() if name == source}))


def _reshards(recipe: Recipe, nodes: Sequence[PlannedNode], source: PlannedNode) -> list[Reshard]:
    """One reshard from a node to every other layout that reads from it, or that works on the rows that it made."""
    reshards: list[Reshard] = []
    for peers in peers_of(nodes):
        layout, columns = peers[0].layout, _columns_from(source.name, peers)
        # A layout gets its rows with the first columns that its nodes read; a first node that reads none gets the rows
        # alone.
        first = next((node for node in peers if node.row_set == source.name), None)
        is_target = columns or (first is not None and not first.reads)
        if is_target and not layout.holds_rows_like(source.layout):
            rows = source.row_set_after
            # Groups are kept if any reader needs them whole: later reshards of these rows keep the same owners.
            whole = keeps_groups(recipe, nodes, rows, layout)
            # Where rows are trained in several updates, each update is balanced by itself.
            num_updates = recipe.batch.parts_per_step if _are_trained(nodes, rows, layout) else 1
            # Of the readers, one that trains has the most work.
            trained_first = sorted(peers, key=lambda node: node.spec.role_use != "train")
            quadratic = next((x.quadratic_tokens for x in trained_first if x.quadratic_tokens), QUADRATIC_TOKENS)
            own = source.name, rows, columns, source.layout, layout, whole
            reshards.append(Reshard(*own, num_updates=num_updates, quadratic_tokens=quadratic))
    return reshards


def _are_trained(nodes: Sequence[PlannedNode], row_set: str, layout: Layout) -> bool:
    """Whether a layout trains on a row set, or on rows that it makes of it."""
    training = [node for node in nodes if node.spec.role_use == "train" and node.layout.holds_rows_like(layout)]
    return any(_arrives(nodes, row_set, node.row_set, layout) for node in training)


def with_history(nodes: Sequence[PlannedNode], schedule: Sequence[Action], before: list[Action]) -> list[Action]:
    """The same entries, each reshard with what its target already has from those `before`, to which all are added."""
    entries: list[Action] = []
    for action in schedule:
        entry = action
        match action:
            case Reshard():
                entry = _after(action, nodes, before)
            case Repeat() | Windowed():
                entry = replace(action, body=tuple(with_history(nodes, action.body, before)))
        # Entries within a body count for those behind it, and for later ones of the same body.
        before.append(entry)
        entries.append(entry)
    return entries


def _after(reshard: Reshard, nodes: Sequence[PlannedNode], schedule: Sequence[Action]) -> Reshard:
    """A reshard with what its target already has from earlier entries."""
    target = reshard.target_layout
    before = [action for action in schedule if isinstance(action, Reshard) and action.row_set == reshard.row_set]
    # A layout has a row set if it has been sent some of its columns, has made the rows, or has loaded them.
    has_rows = [action.target_layout for action in before]
    has_rows += [node.layout for node in makers(nodes, reshard.row_set)]
    if reshard.row_set == DATA:
        has_rows += [action.layout for action in schedule if isinstance(action, Load)]
    spares = [
        action.target_layout
        for action in before
        if action.source == reshard.source
        # All columns, or the bytes would have to be sent all the same; some ranks in common, or none could keep theirs.
        and set(reshard.columns) <= set(action.columns)
        and not set(target.ranks).isdisjoint(action.target_layout.ranks)
    ]
    return replace(
        reshard,
        is_late=any(layout.holds_rows_like(target) for layout in has_rows),
        spare_layout=spares[0] if spares else None,
    )


def keeps_groups(recipe: Recipe, nodes: Sequence[PlannedNode], row_set: str, layout: Layout) -> bool:
    """Whether a node on a layout needs whole groups of a row set, or of rows that are made from it on that layout."""
    for node in nodes:
        is_asked = node.name in recipe.layout and recipe.layout[node.name].groups == "whole"
        if not node.layout.holds_rows_like(layout) or not (node.needs_whole_groups or is_asked):
            continue
        if _arrives(nodes, row_set, node.row_set, layout):
            return True
    return False


def _arrives(nodes: Sequence[PlannedNode], row_set: str, made: str, layout: Layout) -> bool:
    """Whether a layout makes one row set of another, or they are the same."""
    return row_set == made or any(
        maker.layout.holds_rows_like(layout) and _arrives(nodes, row_set, maker.row_set, layout)
        for maker in makers(nodes, made)
    )
