"""Lets a run continue under another plan, at the border of a step and in the same processes."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from leaderless.data.batch import Batch
from leaderless.data.surplus import Surplus
from leaderless.data.transport import ProcessGroup
from leaderless.device import trim_host_memory
from leaderless.observability.trace import Tracer
from leaderless.planner import Plan
from leaderless.planner.replan import check_adoptable
from leaderless.worker.chain import Chain
from leaderless.worker.channels import Flight, between_loops
from leaderless.worker.evaluation import make_evaluator
from leaderless.worker.join import add_process_groups
from leaderless.worker.move_rows import move_rows
from leaderless.worker.parts import Parts, Progress


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
    places = _places(old, progress, world)
    in_flight = range(progress.trained + 1, max(step for step, _ in places) + 1)
    chain.channels.drain(in_flight)
    add_process_groups(plan, parts.transport)
    states = _node_states(old, progress, world)
    surplus = _move_surplus(old, plan, chain.buffer.surplus, world)
    flight = _move_flight(old, plan, chain.channels.flight(), in_flight, world)
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
    progress.step, progress.data_position = places[plan.loops.index(plan.loop_of(world.rank))]
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


def _places(plan: Plan, progress: Progress, world: ProcessGroup) -> list[tuple[int, int]]:
    """The iteration and the position in the data of each loop, on all ranks."""
    mine = [(progress.step, progress.data_position) if world.rank in loop.ranks else (0, 0) for loop in plan.loops]
    known = world.max(torch.tensor(mine), "the places of loops").tolist()
    return [(step, position) for step, position in known]


def _move_surplus(old: Plan, new: Plan, surplus: Surplus, world: ProcessGroup) -> Batch | None:
    """The surplus groups that this rank keeps under a new plan: those that it would read from a checkpoint."""
    if old.repeat is None or new.repeat is None:
        return None
    return move_rows(old.repeat.layout, new.repeat.layout, surplus.batch, world, "the surplus groups")


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
