"""Lets a run continue under another plan, at the border of a step and in the same processes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.base.devices import trim_host_memory
from leaderless.data.batch import Batch, with_rows
from leaderless.data.buffer.databuffer import sort_rows
from leaderless.data.buffer.row_agreement import Surplus
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.clock import Tracer
from leaderless.planner import Layout, Plan
from leaderless.planner.placement.replanning import MANY, check_adoptable
from leaderless.worker.asynchronous.async_state import GroupDivision, RemainingPrompts, remaining_after
from leaderless.worker.asynchronous.channels import Flight, between_loops
from leaderless.worker.asynchronous.journal import cut_journals
from leaderless.worker.build.join import add_process_groups
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.chain import Chain
from leaderless.worker.checkpoint.channel_rows import rows_from_bytes, rows_to_bytes, share_of


def adopt(plan: Plan, parts: Parts, progress: Progress, chain: Chain, tracer: Tracer) -> tuple[Parts, Chain]:
    """Move what a run keeps to the layouts of another plan. All ranks of the world call it together.

    Everything that a checkpoint would hold goes straight to the ranks that hold it under the new plan, so the run
    continues as if it had been stopped here and resumed with that plan.

    Returns:
        The parts and the chain to continue with; those so far are moved and closed.

    Raises:
        RecipeError: One of the plans cannot be changed while the run goes on.
    """
    old, world = parts.plan, parts.transport.world
    check_adoptable(parts.recipe, old, plan)
    places = _places(old, progress, world)
    chain.channels.drain(range(progress.trained + 1, max(place.most for place in places) + 1))
    add_process_groups(plan, parts.transport)
    in_flight = range(progress.trained + 1, max(place.made for place in places) + 1)
    progress.remaining = _give_up(plan, parts, progress, chain)
    states = _node_states(old, progress, world)
    surplus = None
    if old.repeat is not None and plan.repeat is not None:
        groups = chain.buffer.surplus.batch
        surplus = move_rows(old.repeat.layout, plan.repeat.layout, groups, world, "the surplus groups")
    flight = _move_flight(old, plan, chain.channels.flight(), in_flight, world)
    for loader in chain.loaders.values():
        loader.close()
    chain.channels.close()
    parts.roles.adopt(plan)
    trim_host_memory()
    parts.roles.sync_all()
    parts = replace(parts, plan=plan)
    is_asked_to_stop, num_roll_backs = chain.channels.is_asked_to_stop, chain.num_roll_backs
    chain = Chain(parts, progress, tracer)
    chain.num_roll_backs, chain.channels.is_asked_to_stop = num_roll_backs, is_asked_to_stop
    progress.nodes = {name: states[name] for name in progress.nodes}
    place = places[plan.loops.index(plan.loop_of(world.rank))]
    progress.step, progress.data_position = place.made, place.data_position
    for loader in chain.loaders.values():
        loader.position = progress.data_position
    chain.buffer.surplus = Surplus(surplus)
    chain.channels.open_journals()
    chain.channels.refill(flight)
    return parts, chain


def _node_states(plan: Plan, progress: Progress, world: ProcessGroup) -> dict[str, dict[str, float]]:
    """The state of every node, on all ranks; the first rank of a node has it."""
    by_rank: dict[int, list[str]] = {}
    for node in plan.nodes:
        by_rank.setdefault(node.layout.ranks[0], []).append(node.name)
    states: dict[str, dict[str, float]] = {}
    for rank, names in by_rank.items():
        mine = {name: progress.nodes[name] for name in names} if world.rank == rank else {}
        states |= json.loads(world.broadcast_text(json.dumps(mine), rank, "the state of nodes"))
    return states


class _Place(NamedTuple):
    """The place of a loop: iterations that all its ranks have made, and the most of them, and its place in the data."""

    made: int
    most: int
    data_position: int


def _places(plan: Plan, progress: Progress, world: ProcessGroup) -> list[_Place]:
    here = [-progress.step, progress.step, progress.data_position]
    mine = [here if world.rank in loop.ranks else [-MANY, 0, 0] for loop in plan.loops]
    known = world.max(torch.tensor(mine), "the places of loops").tolist()
    return [_Place(-made, most, position) for made, most, position in known]


def _give_up(plan: Plan, parts: Parts, progress: Progress, chain: Chain) -> RemainingPrompts | None:
    """Give up what ranks that generate continuously are in the middle of; returns what this rank begins again.

    All ranks call it together. The groups are those that a checkpoint would give to each rank.
    """
    world, recipe = parts.transport.world, parts.recipe
    if not plan.continuous_loops or not progress.trained:
        return None
    generation, before = chain.generation, parts.plan.loop_of(world.rank)
    loop = plan.continuous_loops[0]
    known = [] if generation is None else [generation.snapshot()]
    starts = torch.tensor([0 if generation is None else generation.start + 1])
    start = int(world.max(starts, "the starts of ranks that generate"))
    division = GroupDivision(loop.portions, recipe.batch.prompts_per_step, recipe.steps)
    shard = loop.ranks.index(world.rank) if world.rank in loop.ranks else None
    made, remaining, _ = remaining_after(known, world, shard, division, start=start, logged=recipe.steps)
    if generation is not None:
        cut_journals(parts.directory, before.name, before.ranks.index(world.rank), len(before.ranks), made)
    return remaining


def _move_flight(old: Plan, new: Plan, held: Flight, iterations: range, world: ProcessGroup) -> Flight:
    """The rows between loops that this rank is to send under a new plan, as if it read them from a checkpoint."""
    moved: Flight = {}
    for was, channel in zip(between_loops(old), between_loops(new), strict=True):
        for iteration in iterations:
            for before, action in zip(was.reshards, channel.reshards, strict=True):
                mine = held.get((was.name, iteration), {}).get(before)
                what = f"the rows of iteration {iteration} of channel {channel.name}"
                rows = move_rows(before.source_layout, action.source_layout, mine, world, what)
                if rows is not None:
                    moved.setdefault((channel.name, iteration), {})[action] = rows
    return moved


def move_rows(source: Layout, target: Layout, held: Batch | None, world: ProcessGroup, what: str) -> Batch | None:
    """Send rows to the ranks that would read them from a checkpoint. All ranks of the world call it together.

    `held` are the rows of this rank's shard of the layout `source`, if it has some; `what` names them in errors.

    Returns:
        The rows of this rank's shard of the layout `target`; None if it has none, or nobody has had rows.
    """
    mine = held if world.rank in source and source.represents(world.rank) else None
    own = torch.zeros(0, dtype=torch.int64) if mine is None else torch.unique(mine.group_ids)
    gathered = world.gather(own, what)
    has_any = int(world.sum(torch.tensor([int(mine is not None)]), what)) > 0
    if not has_any:
        return None
    known = [gathered[world.ranks.index(rank)] for rank in source.representatives]
    shares = _shares(known, target.dp)
    messages: dict[int, Tensor] = {}
    kept: dict[int, Batch] = {}
    for shard, (senders, groups) in enumerate(shares):
        place = source.shard_of(world.rank) if mine is not None else -1
        if mine is None or place not in senders:
            continue
        part = mine if source.dp == target.dp else mine.select(torch.isin(mine.group_ids, groups))
        message = rows_to_bytes(part)
        for rank in target.ranks[shard * target.ranks_per_shard : (shard + 1) * target.ranks_per_shard]:
            if rank == world.rank:
                kept[place] = part
            else:
                messages[rank] = message
    senders = shares[target.shard_of(world.rank)][0] if world.rank in target else []
    here = {source.representatives[sender]: sender for sender in senders}
    received = world.exchange(messages, sorted(rank for rank in here if rank != world.rank), what)
    if world.rank not in target:
        return None
    arrived = kept | {here[rank]: rows_from_bytes(message) for rank, message in received.items()}
    parts = [arrived[place] for place in sorted(arrived)]
    return parts[0] if source.dp == target.dp else sort_rows(Batch.concat(with_rows(parts)), what)


def _shares(known: list[Tensor], num_shards: int) -> list[tuple[list[int], Tensor]]:
    """For each new shard the old ones that send it rows, at least one, and the groups that it gets.

    With as many shards as before each keeps its rows, so that sums come out the same to the last bit.
    """
    if len(known) == num_shards:
        return [([shard], groups) for shard, groups in enumerate(known)]
    groups = torch.unique(torch.cat(known))
    shares = []
    for shard in range(num_shards):
        mine = share_of(groups, shard, num_shards)
        senders = {place for place, held in enumerate(known) if bool(torch.isin(held, mine).any())}
        # Without any group a shard still has to know the columns.
        shares.append((sorted(senders or {shard * len(known) // num_shards}), mine))
    return shares
