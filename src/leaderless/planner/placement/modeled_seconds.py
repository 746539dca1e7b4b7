"""A profile that nobody has measured: seconds of the stages by the cost model, for machines that a file describes."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from statistics import median

import numpy as np

from leaderless.config import Recipe, RecipeError
from leaderless.planner.layout import Cluster
from leaderless.planner.make_plan import make_plan
from leaderless.planner.placement.candidates import two_pools
from leaderless.planner.placement.node_seconds import fit_seconds
from leaderless.planner.placement.stage_seconds import MachineIdentity, Point, Profile, settings_of
from leaderless.planner.plan import Plan
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.network import Network
from leaderless.planner.simulate.rows import sample_workload, samplers_of
from leaderless.planner.simulate.step import Worked, events_of, walk_peers
from leaderless.planner.workflow import Workflow

PARTS = (1, 2, 4, 8)
"""Ranks that share a step: all of them, and these parts."""
MAX_SHARDS = 8
"""Shards of a plan whose seconds are taken; the others are like them."""
MAX_LENGTHS = 4096
"""Number of responses whose lengths are kept."""


def modeled_profile(recipe: Recipe, workflow: Workflow, cluster: Cluster, constants: ClusterConfig) -> Profile:
    """Seconds that a recipe's stages should take on some machines: a pure function, equal on every rank.

    The laws are fitted to simulated steps as those of a measured profile are to real ones: on all ranks, on parts of
    them, and in two pools. Rewards, environments and tools take no time in the cost model.

    Raises:
        RecipeError: The workflow repeats nodes, or the size of a model is not known.
    """
    helpers = recipe.placement.helpers if recipe.placement else 0
    devices = replace(cluster, world_size=max(1, cluster.world_size - helpers))
    plain = recipe.model_copy(update={"layout": {}, "placement": None, "channels": {}})
    whole = make_plan(plain, workflow, devices)
    steps = _SimulatedSteps(constants)
    steps.add(whole, plain)
    for part in PARTS[1:]:
        with suppress(RecipeError):  # so few ranks may not divide the recipe's sizes
            if devices.world_size % part == 0:
                steps.add(make_plan(plain, workflow, replace(devices, world_size=devices.world_size // part)), plain)
    for pools in two_pools(whole):
        with suppress(RecipeError):  # a candidate of this kind is refused then, with the reason
            apart = plain.model_copy(update={"layout": pools.layout, "channels": pools.channels})
            steps.add(make_plan(apart, workflow, devices), apart)
    return steps.profile(recipe, whole)


class _SimulatedSteps:
    """Simulated steps of some plans."""

    def __init__(self, constants: ClusterConfig) -> None:
        self._constants = constants
        self._points: dict[str, list[Point]] = defaultdict(list)
        self._moves, self._syncs = list[float](), list[float]()
        self._besides: float | None = None  # seconds of the first step outside of its nodes

    def add(self, plan: Plan, recipe: Recipe) -> None:
        """Simulate a step, with the same errors as `events_of`."""
        network = Network(self._constants, plan.world_size)
        workload = sample_workload(recipe, self._constants.workload, [node.node.role for node in samplers_of(plan)])
        events = events_of(plan, recipe, workload, network)
        estimate, spent = walk_peers(events, network), 0.0
        for event in events:
            if isinstance(event, Worked):
                self._points[event.node.name] += _points_of(event)
                spent += float(event.seconds.max())
        self._moves += [cost.seconds for cost in estimate.transitions.values()]
        self._syncs += [cost.seconds for cost in estimate.weights.values()]
        self._besides = max(0.0, estimate.seconds - spent) if self._besides is None else self._besides

    def profile(self, recipe: Recipe, plan: Plan) -> Profile:
        """The laws of these steps; the lengths of responses are those of a step of a plan."""
        constants, places = self._constants, recipe.rollout.max_sequences
        workload = sample_workload(recipe, constants.workload, [node.node.role for node in samplers_of(plan)])
        memory_gib = constants.device.memory_gib
        return Profile(
            machine=MachineIdentity(processor=constants.name, accelerator=constants.name, memory_gib=memory_gib),
            settings=settings_of(recipe),
            world_size=plan.world_size,
            stages={name: fit_seconds(points, places) for name, points in self._points.items()},
            reshard_s=median(self._moves or [0.0]),
            sync_s=median(self._syncs or [0.0]),
            overhead_s=self._besides or 0.0,
            lengths=tuple(workload.samples.response_tokens[:MAX_LENGTHS].tolist()),
            cluster=constants.name,
        )


def _points_of(event: Worked) -> list[Point]:
    """The work of some shards, and its seconds; where all shards take the same time, of the fullest one."""
    layout, rows = event.node.layout, event.rows_after
    shard_of_rank = np.zeros(layout.ranks[-1] + 1, dtype=np.int64)
    shard_of_rank[list(layout.ranks)] = [layout.shard_of(rank) for rank in layout.ranks]
    shards = shard_of_rank[event.holders_after]
    counts, tokens = (np.bincount(shards, weights=some, minlength=layout.dp) for some in (None, rows.response_tokens))
    longest = np.zeros(layout.dp)
    np.maximum.at(longest, shards, rows.response_tokens)
    work = np.stack([counts, tokens, longest, event.seconds], axis=1)
    if event.node.spec.role_use != "generate":
        return [Point(*work.max(axis=0).tolist())]
    points = [Point(*numbers) for numbers in work[:MAX_SHARDS].tolist()]
    lengths = (tuple(rows.response_tokens[shards == shard].tolist()) for shard in range(len(points)))
    return [point._replace(lengths=own) for point, own in zip(points, lengths, strict=True)]
