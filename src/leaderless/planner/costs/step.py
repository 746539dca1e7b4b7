"""The time of one step: clocks of all ranks, moved on entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from leaderless.config import Recipe
from leaderless.planner import Layout, Plan
from leaderless.planner.costs.cluster import GIB, ClusterConfig
from leaderless.planner.costs.events import Event, Loaded, Moved, Synced, Worked, events_of
from leaderless.planner.costs.moves import Cost, peer_cost, put_cost, weights_cost
from leaderless.planner.costs.network import Network
from leaderless.planner.costs.rows import Int, Workload


@dataclass(frozen=True)
class Estimate:
    """One step.

    Attributes:
        seconds: Duration of the step.
        tokens_per_s: Prompt and response tokens per second, over all ranks.
        transition_seconds: Sum over all reshards, including those that run at the same time.
        interface_bytes: Bytes through the busiest interface in the busiest reshard, in and out together.
        process_bytes: Rows and messages in main memory of the busiest process.
        host_bytes: The same for all processes of a host.
        fits_host: Whether they fit the host's main memory.
        transitions: Cost of each reshard, and of comparing rows at `put`, by name.
        weights: Cost of sending new weights, by name.
    """

    seconds: float
    tokens_per_s: float
    transition_seconds: float
    interface_bytes: int
    process_bytes: int
    host_bytes: int
    fits_host: bool
    transitions: Mapping[str, Cost]
    weights: Mapping[str, Cost]


def estimate_step(plan: Plan, recipe: Recipe, workload: Workload, cluster: ClusterConfig) -> Estimate:
    """Estimate one step.

    Args:
        plan: Plan of the recipe.
        recipe: Batch sizes and models.
        workload: Rows of the step.
        cluster: Constants of the machines.

    Raises:
        RecipeError: The workflow has a loop, or the size of a model is not known.
    """
    network = Network(cluster, plan.world_size)
    return walk_peers(events_of(plan, recipe, workload, network), network)


@dataclass
class Walk:
    """Clocks and memory of all ranks on the way through a step."""

    network: Network
    clocks: np.ndarray[tuple[int], np.dtype[np.float64]] = field(init=False)
    held: Int = field(init=False)
    peak_bytes: int = 0
    transitions: dict[str, Cost] = field(default_factory=dict)
    weights: dict[str, Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clocks = np.zeros(self.network.num_ranks)
        self.held = np.zeros(self.network.num_ranks, dtype=np.int64)

    def together(self, ranks: Iterable[int], took: float) -> None:
        """Some ranks wait for each other, and then take the same time."""
        chosen = np.fromiter(ranks, dtype=np.int64)
        self.clocks[chosen] = self.clocks[chosen].max() + took

    def work(self, event: Worked, begin: float = 0.0) -> None:
        """A node runs; models begin together, because their weights are gathered."""
        layout = event.node.layout
        chosen = np.array(layout.ranks)
        if event.uses_model:
            begin = max(begin, float(self.clocks[chosen].max()))
            self.clocks[chosen] = begin + np.repeat(event.seconds, layout.ranks_per_shard)

    def sync(self, event: Synced) -> None:
        """Weights go from rank to rank."""
        cost = weights_cost(event.action, event.num_parameters, self.network)
        self.together(event.action.ranks, cost.seconds)
        self.weights[str(event.action)] = cost

    def move(self, name: str, cost: Cost, held_bytes: int) -> None:
        """Add a reshard, and the memory that its busiest process has meanwhile."""
        before = self.transitions.get(name)
        self.transitions[name] = cost if before is None else before + cost
        self.peak_bytes = max(self.peak_bytes, held_bytes + cost.process_bytes)

    def estimate(self, events: Sequence[Event], processes_per_host: int) -> Estimate:
        """What the step took, once all of its events have been walked."""
        cluster, took = self.network.cluster, float(self.clocks.max())
        last = [event for event in events if isinstance(event, Worked)][-1]
        process_bytes = max(self.peak_bytes, int(self.held.max()))
        host_bytes = process_bytes * min(processes_per_host, self.network.num_ranks)
        return Estimate(
            seconds=took,
            tokens_per_s=int(last.rows_after.tokens.sum()) / took,
            transition_seconds=sum(cost.seconds for cost in self.transitions.values()),
            interface_bytes=max((cost.interface_bytes for cost in self.transitions.values()), default=0),
            process_bytes=process_bytes,
            host_bytes=host_bytes,
            fits_host=host_bytes <= cluster.host.memory_gib * GIB,
            transitions=self.transitions,
            weights=self.weights,
        )


def walk_peers(events: Sequence[Event], network: Network) -> Estimate:
    """Estimate a step in which every rank loads its own prompts, and rows go straight to their new owners.

    Args:
        events: All of the step, in order.
        network: Links between the ranks.
    """
    walk = Walk(network)
    traveling = {event.action.source for event in events if isinstance(event, Moved)}
    for event in events:
        match event:
            case Loaded(action, rows, seconds, holders):
                walk.clocks[list(action.layout.ranks)] += np.repeat(seconds, action.layout.ranks_per_shard)
                _hold(walk, action.layout, rows.held_bytes(action.columns), holders)
            case Worked(node=node):
                walk.work(event)
                _hold(walk, node.layout, event.rows_after.held_bytes(node.writes), event.holders_after)
                if node.name in traveling and len(node.layout.ranks) > 1:
                    cost = put_cost(np.array(node.layout.ranks), network)
                    walk.together(node.layout.ranks, cost.seconds)
                    walk.move(f"put({node.name})", cost, int(walk.held.max()))
            case Moved(action, routes):
                cost = peer_cost(routes, action.columns, np.array(action.ranks), network)
                walk.together(action.ranks, cost.seconds)
                walk.move(str(action), cost, int(walk.held.max()))
                # Counted for each row, a prompt that several of a rank's rows share is counted more than once.
                sizes = routes.rows.held_bytes(action.columns) + routes.rows.prompt_bytes(action.columns)
                first = np.array(action.target_layout.ranks)[routes.owners * action.target_layout.ranks_per_shard]
                _hold(walk, action.target_layout, sizes, first)
            case Synced():
                walk.sync(event)
    return walk.estimate(events, network.cluster.host.devices)


def _hold(walk: Walk, layout: Layout, sizes: Int, holders: Int) -> None:
    """Add the rows that ranks hold from now on; all ranks of a shard hold its rows."""
    held = np.bincount(holders, weights=sizes, minlength=walk.network.num_ranks).astype(np.int64)
    ranks = np.array(layout.ranks)
    by_shard = held[ranks].reshape(-1, layout.ranks_per_shard).sum(axis=1)
    walk.held[ranks] += np.repeat(by_shard, layout.ranks_per_shard)
