"""Lets a run continue under another plan, at the border of a step and in the same processes."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import Tensor

from leaderless.checkpoint.rows import rows_from_bytes, rows_to_bytes, share_of
from leaderless.config import Recipe, RecipeError
from leaderless.data.batch import Batch, with_rows
from leaderless.data.surplus import Surplus
from leaderless.data.table import sort_rows
from leaderless.data.transport import ProcessGroup
from leaderless.device import trim_host_memory
from leaderless.observability.trace import Tracer
from leaderless.planner import Layout, Plan
from leaderless.worker.chain import Chain
from leaderless.worker.evaluation import make_evaluator
from leaderless.worker.join import add_process_groups
from leaderless.worker.parts import Parts, Progress


def check_adoptable(recipe: Recipe, old: Plan, new: Plan) -> None:
    """Refuse what cannot be changed while the run goes on.

    Raises:
        RecipeError: There are several loops, since what is in their channels belongs to their layouts; clients of an
            online run, who know the doors of its ranks; or another number of ranks.
    """
    remedy = "stop the run, and continue it with the new layout"
    if len(old.loops) > 1 or len(new.loops) > 1:
        raise RecipeError.at("channels", f"a plan with channels cannot be replaced while the run goes on: {remedy}")
    if recipe.online is not None:
        raise RecipeError.at("online", f"the plan of an online run cannot be replaced while it goes on: {remedy}")
    if new.world_size != old.world_size:
        raise RecipeError.at(
            "layout",
            f"a plan for {new.world_size} workers cannot replace one for {old.world_size} while the run goes on: stop "
            f"the run, and continue it with {new.world_size} workers",
        )


def adopt(plan: Plan, parts: Parts, progress: Progress, chain: Chain, tracer: Tracer) -> tuple[Parts, Chain]:
    """Move what a run keeps to the layouts of another plan. All ranks of the world call it together.

    Everything that a checkpoint would hold goes straight to the ranks that hold it under the new plan, so the run
    continues as if it had been stopped here and resumed with that plan.

    Args:
        plan: Plan to continue with, for the same recipe and ranks.
        parts: Parts of this worker so far; its models are moved.
        progress: Position of the run, whose node states are moved.
        chain: Chain of this rank so far, which is closed.
        tracer: Timer of all that the rank does.

    Returns:
        The parts and the chain to continue with.

    Raises:
        RecipeError: One of the plans cannot be changed while the run goes on.
    """
    old, world = parts.plan, parts.transport.world
    check_adoptable(parts.recipe, old, plan)
    add_process_groups(plan, parts.transport)
    states = _node_states(old, progress, world)
    position = int(world.max(torch.tensor([progress.data_position]), "the position in the data"))
    surplus = _move_surplus(old, plan, chain.buffer.surplus, world)
    for loader in chain.loaders.values():
        loader.close()
    chain.channels.close()
    parts.roles.adopt(plan)
    trim_host_memory()
    parts.roles.sync_all()
    evaluator = None
    if parts.held_out is not None:
        held_out, tokenizer, grade = parts.held_out, parts.tokenizer, parts.grade
        evaluator = make_evaluator(parts.recipe, plan, parts.transport, parts.roles, held_out, tokenizer, grade)
    parts = replace(parts, plan=plan, evaluator=evaluator)
    is_asked_to_stop, num_roll_backs = chain.channels.is_asked_to_stop, chain.num_roll_backs
    chain = Chain(parts, progress, tracer)
    chain.num_roll_backs, chain.channels.is_asked_to_stop = num_roll_backs, is_asked_to_stop
    progress.nodes = {name: states[name] for name in progress.nodes}
    progress.data_position = position
    for loader in chain.loaders.values():
        loader.position = position
    chain.buffer.surplus = Surplus(surplus)
    chain.channels.open_journals()
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


def _move_surplus(old: Plan, new: Plan, surplus: Surplus, world: ProcessGroup) -> Batch | None:
    """The surplus groups that this rank keeps under a new plan: those that it would read from a checkpoint."""
    if old.repeat is None or new.repeat is None:
        return None
    source, target = old.repeat.layout, new.repeat.layout
    holds = world.rank in source and source.represents(world.rank) and surplus.batch is not None
    mine = surplus.batch if holds else None
    own = torch.zeros(0, dtype=torch.int64) if mine is None else torch.unique(mine.group_ids)
    what = "the surplus groups"
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
        for rank in _ranks_of(target, shard):
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


def _ranks_of(layout: Layout, shard: int) -> tuple[int, ...]:
    """The ranks that hold the rows of a shard."""
    return layout.ranks[shard * layout.ranks_per_shard : (shard + 1) * layout.ranks_per_shard]
