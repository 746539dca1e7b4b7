"""Layouts that a running run may change to: the best of the search by the seconds that its own nodes have taken.

Everything here is a pure function of facts that all ranks have agreed on, so all of them find the same layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from math import gcd

from leaderless.config import Recipe, RecipeError
from leaderless.config.layout import LayoutConfig
from leaderless.planner.layout import format_ranks
from leaderless.planner.placement.candidates import Allowed, Candidate, Rough, candidates_of, placeable
from leaderless.planner.placement.node_seconds import StepSeconds
from leaderless.planner.placement.replanning import Links, NodeSeconds, check_exchangeable, with_layout
from leaderless.planner.placement.stage_seconds import MachineIdentity, Profile, StageSeconds
from leaderless.planner.plan import Plan

NUM_PROPOSED = 8
"""Layouts that are planned, the best by a first estimate."""
MANY_RANKS, FEW_PROPOSED = 128, 4
"""From this number of ranks on, this number of layouts is planned."""
NUM_TRIED = 3
"""Layouts that are tried for each that is proposed, as some cannot run or do not fit."""
NOTABLE = 0.1
"""Least share of the seconds of all nodes from which a node without a model may have ranks of its own."""


def propose(
    recipe: Recipe,
    like: Plan,
    nodes: Mapping[str, NodeSeconds],
    fits: Callable[[Plan], bool],
    links: Links | None = None,
) -> dict[str, Plan]:
    """The plans that are worth a comparison, by a description of their layouts; they can replace the plan in force."""
    candidates, tried = _ranked(recipe, like, nodes, links or Links()), 0
    most = NUM_PROPOSED if like.world_size < MANY_RANKS else FEW_PROPOSED
    plans: dict[str, Plan] = {}
    for candidate in candidates:
        if len(plans) == most or tried == NUM_TRIED * most:
            break
        layout = _layout_of(candidate, recipe, like)
        if layout == like.layout:
            continue
        tried += 1
        try:
            plan = with_layout(recipe, layout, like)
            check_exchangeable(recipe, like, plan)
        except RecipeError:
            continue
        if fits(plan):
            plans[describe(plan)] = plan
    return plans


def describe(plan: Plan) -> str:
    """The ranks of the nodes of a plan, as in `rollout, reward on 0-5; policy on 6-7`."""
    pools: dict[tuple[int, ...], list[str]] = {}
    for node in placeable(plan):
        pools.setdefault(node.layout.ranks, []).append(node.name)
    return "; ".join(f"{', '.join(names)} on {format_ranks(ranks)}" for ranks, names in pools.items())


def _ranked(recipe: Recipe, like: Plan, nodes: Mapping[str, NodeSeconds], links: Links) -> list[Candidate]:
    """All candidates, in order of a first estimate of their seconds."""
    base = with_layout(recipe.model_copy(update={"channels": {}}), {}, like)
    mean = {node.name: nodes[node.name].on(len(node.layout.ranks)) for node in like.nodes if node.name in nodes}
    least = NOTABLE * sum(mean.values())
    notable = {name for name in mean if mean[name] >= least > 0 and like[name].spec.role_use == "none"}
    is_ahead = len(like.loops) > 1
    # The lag of generation is kept: other numbers would follow from another one.
    allowed = Allowed(max_lag=int(is_ahead), alone=notable)
    found = [one for one in candidates_of(base, allowed) if bool(one.lag) == is_ahead]
    profile = _profile_of(recipe, base, nodes)
    rough = Rough(base, profile, StepSeconds(profile, recipe))
    if not links.byte_s:
        return sorted(found, key=rough.seconds)
    every = tuple(range(like.world_size))

    def seconds(candidate: Candidate) -> float:
        sent = sum(
            node.num_bytes * links.of(range(*candidate.pools[name]) if name in candidate.pools else every)
            for name, node in nodes.items()
            if node.num_bytes
        )
        return rough.seconds(candidate) + sent

    return sorted((turned for one in found for turned in _turned(one, like.world_size)), key=seconds)


def _turned(candidate: Candidate, world_size: int) -> Iterator[Candidate]:
    """A candidate, and others with its pools in another order: it matters which of them is on a slow host."""
    pools = sorted({pool for pool in candidate.pools.values() if pool != (0, world_size)})
    for turn in range(max(1, len(pools))):
        for order in (pools[turn:] + pools[:turn], (pools[turn:] + pools[:turn])[::-1])[: max(1, len(pools) - 1)]:
            ends = list(accumulate(end - begin for begin, end in order))
            places = {pool: (end - pool[1] + pool[0], end) for pool, end in zip(order, ends, strict=True)}
            moved = {name: places.get(pool, pool) for name, pool in candidate.pools.items()}
            yield replace(candidate, pools=moved)


def _profile_of(recipe: Recipe, plan: Plan, nodes: Mapping[str, NodeSeconds]) -> Profile:
    """Measured seconds as a profile, in which the rows of a step take as long as each other."""
    num_rows = recipe.batch.prompts_per_step * recipe.batch.responses_per_prompt
    stages: dict[str, StageSeconds] = {}
    for node in plan.nodes:
        if node.name in nodes:
            each_s, shared_s = nodes[node.name].law()
            stages[node.name] = StageSeconds(fixed_s=each_s, row_s=shared_s / node.layout.ranks_per_shard / num_rows)
    machine = MachineIdentity(processor="this run's", memory_gib=1)
    return Profile(machine=machine, settings={}, world_size=plan.world_size, stages=stages)


def _layout_of(candidate: Candidate, recipe: Recipe, like: Plan) -> dict[str, LayoutConfig]:
    """The section `layout` with the ranks of a candidate, and all else as the recipe has it.

    A node that the candidate does not place stays with one that it shares its ranks with, if the recipe places it. What
    goes ahead with generation still does so, as other columns would go through the channel.
    """
    ranks = {name: config.ranks for name, config in candidate.layout.items()}
    for name in like.loops[0].nodes if candidate.lag else ():
        if name in recipe.layout:
            ranks[name] = ranks[candidate.leader]
        elif name != candidate.leader:
            ranks.pop(name, None)
    for node in placeable(like):
        if node.name in recipe.layout and node.name not in ranks:
            sharing = (other for other in candidate.pools if like[other].layout.ranks == node.layout.ranks)
            ranks[node.name] = next((ranks[other] for other in sharing), "all")
    return {name: _moved(recipe.layout.get(name, LayoutConfig()), name, ranks[name], like) for name in ranks}


def _moved(config: LayoutConfig, name: str, ranks: str, like: Plan) -> LayoutConfig:
    """The layout of a node on other ranks.

    If all ranks divided experts, all new ones do; otherwise as many as the old size and the new stages allow. For a
    model of unknown size, `ep` stays as it was.
    """
    moved = config.model_copy(update={"ranks": ranks})
    if config.ep == 1 or like.sizes.get(like[name].node.role or "") is None:
        return moved
    before, count = len(config.ranks_of(like.world_size)), len(moved.ranks_of(like.world_size))
    return moved.model_copy(update={"ep": count if config.ep == before else gcd(config.ep, count // config.pp)})
