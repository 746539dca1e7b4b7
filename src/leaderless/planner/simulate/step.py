"""One step: what happens in it, in the order of the plan, and the clocks of all ranks on the way through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from leaderless.config import Recipe, RecipeError
from leaderless.planner import (
    Layout,
    Load,
    Plan,
    PlannedNode,
    Pull,
    Push,
    Repeat,
    Reshard,
    RunNode,
    SyncWeights,
    Windowed,
    flat,
)
from leaderless.planner.engines import engine_of, may_send_differences
from leaderless.planner.graph.judges import as_judged
from leaderless.planner.memory.model import FLOAT32_BYTES, number_bytes
from leaderless.planner.simulate.cluster import GIB, ClusterConfig
from leaderless.planner.simulate.compute import ModelCost, tokenizing_seconds
from leaderless.planner.simulate.network import Float, Network, sums
from leaderless.planner.simulate.rows import Int, RowPlacement, SimulatedRoutes, SimulatedRows, Workload, sending_ranks
from leaderless.planner.simulate.transfers import (
    Cost,
    difference_share,
    peer_cost,
    put_cost,
    updates_cost,
    weights_cost,
)

Models = Mapping[tuple[str | None, tuple[int, ...]], ModelCost]
"""The cost of every model, by its role and ranks."""


@dataclass(frozen=True)
class Loaded:
    """Prompts loaded by a layout: [dp] seconds of each shard, where it loads its own, and [n] rank that sends each."""

    action: Load
    rows: SimulatedRows
    seconds: Float
    holders: Int


@dataclass(frozen=True)
class Worked:
    """A node that has run: its rows before and after, with [n] rank that sends each of them, and its number of updates.

    The seconds count for each shard, [dp], once all ranks of the node have begun.
    """

    node: PlannedNode
    rows: SimulatedRows
    holders: Int
    rows_after: SimulatedRows
    holders_after: Int
    seconds: Float
    num_updates: int = 1


@dataclass(frozen=True)
class Moved:
    """Rows sent to another layout; through a channel, while the ranks that send them continue."""

    action: Reshard
    routes: SimulatedRoutes
    through_channel: bool = False


@dataclass(frozen=True)
class Synced:
    """Weights sent to another layout; through a channel, while all ranks continue."""

    action: SyncWeights
    num_bytes: int
    is_gathered: bool
    through_channel: bool = False
    sent_share: float = 1.0
    gathered_share: float = 1.0


Event = Loaded | Worked | Moved | Synced


def events_of(plan: Plan, recipe: Recipe, workload: Workload, network: Network) -> tuple[Event, ...]:
    """Events of one step, or in one iteration of every loop, in the order of the plan.

    Raises:
        RecipeError: The workflow repeats nodes, or the size of a model is not known.
    """
    models, placement, events = _model_costs(plan, recipe, network), RowPlacement(plan, workload), list[Event]()
    for action in flat(plan.schedule):
        match action:
            case Load(layout, _):
                shards, rows = placement.load(action), workload.prompts
                took = tokenizing_seconds(rows, network.cluster.dataloader.tokens_per_s, shards, layout.dp)
                events.append(Loaded(action, rows, took, sending_ranks(shards, layout)))
            case RunNode(name):
                events.append(_work(plan[name], models, placement, recipe))
            case Reshard():
                events.append(Moved(action, placement.reshard(action)))
            case SyncWeights():
                events.append(_synced(plan, recipe, models, action, network))
            case Pull(name):
                channel = plan.channel(name)
                events += [Moved(move, placement.reshard(move), through_channel=True) for move in channel.reshards]
                if channel.sync is not None:
                    events.append(_synced(plan, recipe, models, channel.sync, network, through_channel=True))
            case Push():  # sent while the ranks continue, and counted where it is pulled
                continue
            case Windowed():  # overlap is not modeled: its entries follow each other
                continue
            case Repeat():
                raise RecipeError.at(
                    "workflow",
                    f"'{plan.workflow}' repeats nodes, and how often depends on rewards, which a "
                    "simulation does not know: simulate a workflow without one, as grpo",
                )
    return tuple(events)


def _synced(
    plan: Plan, recipe: Recipe, models: Models, action: SyncWeights, network: Network, *, through_channel: bool = False
) -> Synced:
    """New weights: float32, but what engines compute in where ranks only generate, and differences if they are sent."""
    num_parameters = models[action.role, action.source_layout.ranks].size.num_parameters
    key, config = (action.role, action.target_layout), recipe.model_of(action.role)
    assert config is not None, "checked by the planner"
    taker = next((one for one in plan.instances if one.is_engine_only and (one.role, one.layout) == key), None)
    if taker is None:
        return Synced(action, num_parameters * FLOAT32_BYTES, is_gathered=False, through_channel=through_channel)
    width, own = number_bytes(config), recipe.as_seen_by(action.role)
    whole = Synced(action, num_parameters * width, is_gathered=True, through_channel=through_channel)
    is_apart = own.rollout.weights == "difference" or len(np.unique(network.hosts(np.array(action.ranks)))) > 1
    if not (is_apart and may_send_differences(own.rollout, taker.engine, config, is_on_host=through_channel)):
        return whole
    changed = network.cluster.workload.changed_share if width < FLOAT32_BYTES else 1.0
    share, spec = difference_share(changed, width), engine_of(taker.engine)
    # Only ranks that have all weights from before gather differences, too.
    has_all = taker.engine == "native" or spec.restarts_on(taker.serving_layout) or len(taker.layout.ranks) == 1
    return replace(whole, sent_share=share, gathered_share=share if has_all else 1.0)


def _work(node: PlannedNode, models: Models, placement: RowPlacement, recipe: Recipe) -> Worked:
    rows, shards = placement.rows(node.row_set), placement.shards(node.row_set, node.layout)
    # A node that joins rows puts the rows of one node into a table that holds others, too.
    row_set_after = node.row_set if node.spec.rows == "join" else node.row_set_after
    after, shards_after = placement.rows(row_set_after), placement.run(node)
    took = np.zeros(node.layout.dp)
    if node.spec.role_use != "none":
        model = models[node.node.role, node.layout.ranks]
        match node.spec.role_use:
            case "generate":
                took = replace(model, layout=node.layout).generation_seconds(after, shards_after)
            case "score":
                took = took + model.scoring_seconds(rows, shards)
            case "train":
                took = took + model.training_seconds(rows, shards)
    for name, role in node.node.judges:  # they are asked one after the other
        judge = replace(models[role, node.layout.ranks], layout=node.layout)
        took = took + judge.judging_seconds(recipe.reward.judges()[name], rows, shards)
    holders, holders_after = sending_ranks(shards, node.layout), sending_ranks(shards_after, node.layout)
    return Worked(node, rows, holders, after, holders_after, took, recipe.batch.updates_per_step)


def _model_costs(plan: Plan, recipe: Recipe, network: Network) -> Models:
    costs: dict[tuple[str | None, tuple[int, ...]], ModelCost] = {}
    for instance in plan.instances:
        model, size = recipe.model_of(instance.role), plan.sizes[instance.role]
        assert model is not None, "the planner refuses a role without a model"
        if size is None:
            raise RecipeError.at(
                f"models.{instance.role}" if instance.role in recipe.models else "models.policy",
                f"the size of '{model.name}' is not known, because its config.json is not on this machine or is of no "
                "known family: name a folder that holds one",
            )
        own = as_judged(recipe, instance.role) if instance.is_judge else recipe.as_seen_by(instance.role)
        keeps_latents = instance.has_engine and engine_of(instance.engine).keeps_weights
        costs[instance.role, instance.layout.ranks] = ModelCost(
            size, model, instance.layout, network, own, keeps_latents=keeps_latents
        )
    return costs


@dataclass(frozen=True)
class Estimate:
    """One step.

    Attributes:
        seconds: Duration of the step; of several loops, which work at the same time, the duration of the slowest.
        tokens_per_s: Prompt and response tokens per second, over all ranks.
        transition_seconds: Sum over all reshards, including those that run at the same time.
        interface_bytes: Bytes through the busiest interface in the busiest reshard, in and out together.
        process_bytes: Rows and messages in main memory of the busiest process.
        host_bytes: Rows and messages in main memory of all processes of the busiest host.
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
    """Estimate one step, with the same errors as `events_of`."""
    network = Network(cluster, plan.world_size)
    return walk_peers(events_of(plan, recipe, workload, network), network)


class Walk:
    """Clocks and memory of all ranks on the way through a step."""

    def __init__(self, network: Network) -> None:
        self.network, self.peak_bytes, self.travel_s = network, 0, 0.0
        self.clocks, self.held = np.zeros(network.num_ranks), np.zeros(network.num_ranks, dtype=np.int64)
        self.transitions: dict[str, Cost] = {}
        self.weights: dict[str, Cost] = {}

    def hold(self, layout: Layout, sizes: Int, holders: Int) -> None:
        """Add the rows that ranks hold from now on; all ranks of a shard hold its rows."""
        held, ranks = sums(holders, sizes, self.network.num_ranks), np.array(layout.ranks)
        by_shard = held[ranks].reshape(-1, layout.ranks_per_shard).sum(axis=1)
        self.held[ranks] += np.repeat(by_shard, layout.ranks_per_shard)

    def together(self, ranks: Iterable[int], took: float) -> None:
        """Some ranks wait for each other, and then take the same time."""
        chosen = np.fromiter(ranks, dtype=np.int64)
        self.clocks[chosen] = self.clocks[chosen].max() + took

    def work(self, event: Worked, begin: float = 0.0) -> None:
        """A node runs; models begin together, because their weights are gathered."""
        chosen = np.array(event.node.layout.ranks)
        if event.node.uses:
            begin = max(begin, float(self.clocks[chosen].max()))
            self.clocks[chosen] = begin + np.repeat(event.seconds, event.node.layout.ranks_per_shard)

    def sync(self, event: Synced) -> None:
        """Weights go from rank to rank; through a channel, for no longer than an iteration lasts."""
        cost = weights_cost(
            event.action,
            event.num_bytes,
            self.network,
            is_gathered=event.is_gathered,
            sent_share=event.sent_share,
            gathered_share=event.gathered_share,
        )
        if event.through_channel:
            self.travel_s += cost.seconds
        else:
            self.together(event.action.ranks, cost.seconds)
        self.weights[str(event.action)] = cost

    def move(self, name: str, cost: Cost, held_bytes: int) -> None:
        """Add a reshard, and the memory of its busiest process."""
        self.transitions[name] = self.transitions[name] + cost if name in self.transitions else cost
        self.peak_bytes = max(self.peak_bytes, held_bytes + cost.process_bytes)

    def estimate(self, events: Sequence[Event], processes_per_host: int) -> Estimate:
        """Estimate for the step, once all of its events have been walked."""
        cluster, took = self.network.cluster, max(float(self.clocks.max()), self.travel_s)
        worked = [event for event in events if isinstance(event, Worked)]
        sampled = [event for event in worked if event.node.spec.samples] or worked[-1:]
        process_bytes = max(self.peak_bytes, int(self.held.max()))
        host_bytes = process_bytes * min(processes_per_host, self.network.num_ranks)
        return Estimate(
            seconds=took,
            tokens_per_s=sum(int(event.rows_after.tokens.sum()) for event in sampled) / took,
            transition_seconds=sum(cost.seconds for cost in self.transitions.values()),
            interface_bytes=max((cost.interface_bytes for cost in self.transitions.values()), default=0),
            process_bytes=process_bytes,
            host_bytes=host_bytes,
            fits_host=host_bytes <= cluster.host.memory_gib * GIB,
            transitions=self.transitions,
            weights=self.weights,
        )


def walk_peers(events: Sequence[Event], network: Network) -> Estimate:
    """Estimate a step in which every rank loads its own prompts, and rows go straight to their new owners."""
    walk = Walk(network)
    traveling = {event.action.source for event in events if isinstance(event, Moved)}
    for event in events:
        match event:
            case Loaded(action, rows, seconds, holders):
                walk.clocks[list(action.layout.ranks)] += np.repeat(seconds, action.layout.ranks_per_shard)
                walk.hold(action.layout, rows.held_bytes(action.columns), holders)
            case Worked(node=node):
                if node.spec.role_use == "train":
                    ranks = np.array(node.layout.ranks)
                    agreed = updates_cost(event.rows, event.holders, event.num_updates, ranks, network)
                    walk.together(ranks, agreed.seconds)
                walk.work(event)
                walk.hold(node.layout, event.rows_after.held_bytes(node.writes), event.holders_after)
                if node.name in traveling and len(node.layout.ranks) > 1:
                    cost = put_cost(np.array(node.layout.ranks), network)
                    walk.together(node.layout.ranks, cost.seconds)
                    walk.move(f"put({node.name})", cost, int(walk.held.max()))
            case Moved(action, routes):
                cost = peer_cost(routes, action.columns, np.array(action.ranks), network)
                # Ranks that send through a channel continue meanwhile.
                busy = action.target_layout.ranks if event.through_channel else action.ranks
                walk.together(busy, cost.seconds)
                walk.move(str(action), cost, int(walk.held.max()))
                # Counted for each row, a prompt that several of a rank's rows share is counted more than once.
                sizes = routes.rows.held_bytes(action.columns) + routes.rows.prompt_bytes(action.columns)
                first = np.array(action.target_layout.ranks)[routes.owners * action.target_layout.ranks_per_shard]
                walk.hold(action.target_layout, sizes, first)
            case Synced():
                walk.sync(event)
    return walk.estimate(events, network.cluster.host.devices)
