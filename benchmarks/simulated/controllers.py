"""Designs in which the batches of all transitions pass through a single process, for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml
from pydantic import Field, field_validator

from leaderless.base.section import Section
from leaderless.config import Recipe, load_section
from leaderless.planner import Plan
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.planner.simulate.network import MICRO, Network, seconds
from leaderless.planner.simulate.rows import Int, SimulatedRoutes, SimulatedRows, Workload
from leaderless.planner.simulate.step import Estimate, Event, Loaded, Synced, Walk, Worked, events_of, walk_peers
from leaderless.planner.simulate.transfers import Cost
from leaderless.planner.workflow.columns import column_of

FOLDER = Path(__file__).parent / "controllers"
"""Folder with the costs of controllers on such machines, for each cluster file in `recipes/clusters`."""
OURS = "ours"
"""Name of the project's own data path in results."""


class ControllerConfig(Section):
    """A single process through which the batches of all transitions pass."""

    pads_rows: bool = True
    """Prompts and responses are padded to the longest; otherwise they are sent as they are."""
    call_us: float = Field(ge=0)
    """Calling one rank, sending or receiving."""
    serialization_gb_per_s: float | None = Field(default=None, gt=0)
    """Serialization and deserialization of objects by one process; none if not given."""
    object_store_gb_per_s: float | None = Field(default=None, gt=0)
    """Bytes copied into the host's object store; there is none if not given."""
    network_gb_per_s: float | None = Field(default=None, gt=0)
    """The most that its transport can carry between hosts; by default the interface's bandwidth."""
    copy_gb_per_s: float = Field(gt=0)
    """Padding, joining and reordering by one process, for each pass over the batch."""
    dataloader_processes: int = Field(ge=1)
    """Processes that tokenize prompts for the controller."""


class ComparedCluster(ClusterConfig):
    """A cluster, and the costs of controllers on it."""

    controllers: Mapping[str, ControllerConfig] = Field(min_length=1)
    """Designs with a single controller, by the name in figures."""

    @field_validator("controllers", mode="after")
    @classmethod
    def _has_names_of_its_own(cls, value: Mapping[str, ControllerConfig]) -> Mapping[str, ControllerConfig]:
        if OURS in value:
            raise ValueError(f"'{OURS}' is how figures call the project's own data path: give another name")
        return value


def load_compared_cluster(path: Path) -> ComparedCluster:
    """Read a cluster file, and the controllers of the same name.

    Args:
        path: Cluster file.
    """
    controllers = yaml.safe_load((FOLDER / path.name).read_text(encoding="utf-8"))
    return ComparedCluster.model_validate(load_section(path, ClusterConfig).model_dump() | {"controllers": controllers})


def estimate_ways(plan: Plan, recipe: Recipe, workload: Workload, cluster: ComparedCluster) -> dict[str, Estimate]:
    """Estimate one step for every data path: the project's own, and that of every controller.

    Rows are on the same ranks and models take the same time on all of them; they differ in how data moves.

    Args:
        plan: Plan of the recipe.
        recipe: Batch sizes and models.
        workload: Rows of the step.
        cluster: Constants of the machines.
    """
    network = Network(cluster, plan.world_size)
    events = events_of(plan, recipe, workload, network)
    central = {
        name: ControllerWalk(network, Controller(config, network), events).finish()
        for name, config in cluster.controllers.items()
    }
    return {OURS: walk_peers(events, network), **central}


@dataclass(frozen=True)
class Controller:
    """A single process on the first host. Each row is sent with its own prompt.

    Attributes:
        config: Its costs.
        network: Network between it and the ranks.
    """

    config: ControllerConfig
    network: Network

    def bytes_of(self, rows: SimulatedRows, columns: Sequence[str]) -> Int:
        """[n] bytes of each row, padded if the controller pads.

        Args:
            rows: All rows.
            columns: Columns that are sent.
        """
        return separate_bytes(rows, columns, is_padded=self.config.pads_rows)

    def exchange(self, sizes: Int, ranks: Int) -> Cost:
        """Receive rows from ranks, or send rows to them, at the same cost.

        Each rank serializes its own rows, and the controller deserializes and joins all of them; or the controller
        orders and serializes all rows, and each rank deserializes its own.

        Args:
            sizes: [n] bytes of each row.
            ranks: [n] rank that sends or receives each row.
        """
        config, link = self.config, self.network.cluster.links.network
        of_rank = np.bincount(ranks, weights=sizes, minlength=self.network.num_ranks).astype(np.int64)
        is_remote = self.network.hosts(np.arange(len(of_rank))) > 0
        total, remote = int(of_rank.sum()), int(of_rank[is_remote].sum())
        if not total:
            return Cost(0.0, 0, 0)
        took = config.call_us * MICRO * int((of_rank > 0).sum()) + seconds(total, config.copy_gb_per_s)
        took += seconds(total + int(of_rank.max()), config.serialization_gb_per_s or np.inf)
        took += seconds(total, config.object_store_gb_per_s or np.inf)
        bandwidth = min(link.bandwidth_gb_per_s, config.network_gb_per_s or link.bandwidth_gb_per_s)
        took += link.latency_us * MICRO * bool(remote) + seconds(remote, bandwidth)
        # the parts and the combined batch, and what the object store holds at that time
        copies = 2 + (config.object_store_gb_per_s is not None)
        return Cost(took, remote, copies * total)


def separate_bytes(rows: SimulatedRows, columns: Sequence[str], *, is_padded: bool) -> Int:
    """[n] bytes of rows that each have their own prompt.

    Args:
        rows: The rows.
        columns: Columns that travel.
        is_padded: Whether prompts and responses are as long as the longest.
    """
    sizes = np.zeros(len(rows), dtype=np.int64)
    for column in map(column_of, columns):
        lengths = np.ones(len(rows), dtype=np.int64) if column.axis is None else rows.lengths_along(column.axis)
        sizes += column.item_bytes * (lengths.max() if is_padded else lengths)
    return sizes


def controller_cost(routes: SimulatedRoutes, columns: Sequence[str], controller: Controller) -> Cost:
    """One transition through a controller that has none of its columns yet.

    Args:
        routes: Routes of the rows.
        columns: Columns that are sent.
        controller: Controller that the rows pass through.
    """
    sizes, size = controller.bytes_of(routes.rows, columns), routes.target.ranks_per_shard
    receivers = np.array(routes.target.ranks).reshape(-1, size)[routes.owners].reshape(-1)
    gathered = controller.exchange(sizes, routes.holders)
    return gathered + controller.exchange(np.repeat(sizes, size), receivers)


class ControllerWalk:
    """The controller loads all prompts, sends every node with a model what it reads, and receives what it wrote.

    Nodes without a model run in the controller, at no cost. It receives a node's columns when the next reader needs
    them, so that nodes on different ranks run at the same time.
    """

    def __init__(self, network: Network, controller: Controller, events: Sequence[Event]) -> None:
        self.controller = controller
        self.events = events
        self.walk = Walk(network)
        self.clock = 0.0
        self.held_bytes = 0
        self.waiting: dict[str, Worked] = {}
        self.wanted = {
            (source, column)
            for event in events
            if isinstance(event, Worked)
            for column, source in event.node.reads.items()
        }

    def finish(self) -> Estimate:
        """Go through the step, and return its costs."""
        for event in self.events:
            match event:
                case Loaded():
                    self._load(event)
                case Worked():
                    self._run(event)
                case Synced():
                    self.walk.sync(event)
        self.walk.clocks = np.maximum(self.walk.clocks, self.clock)
        return self.walk.estimate(self.events, 1)

    def _load(self, event: Loaded) -> None:
        cluster, config = self.walk.network.cluster, self.controller.config
        self.clock += float(event.rows.tokens.sum()) / (cluster.dataloader.tokens_per_s * config.dataloader_processes)
        self.held_bytes += int(self.controller.bytes_of(event.rows, event.action.columns).sum())

    def _run(self, event: Worked) -> None:
        node = event.node
        for source in sorted(set(node.reads.values()) & self.waiting.keys()):
            self._gather(self.waiting.pop(source))
        written = [column for column in node.writes if (node.name, column) in self.wanted]
        if node.spec.role_use == "none":
            self.held_bytes += int(self.controller.bytes_of(event.rows_after, written).sum())
            return
        cost = self.controller.exchange(self.controller.bytes_of(event.rows, tuple(node.reads)), event.holders)
        self.clock += cost.seconds
        self.walk.move(node.name, cost, self.held_bytes)
        self.walk.work(event, begin=self.clock)
        if written:
            self.waiting[node.name] = event

    def _gather(self, event: Worked) -> None:
        """Wait for a node, and receive those of its columns that other nodes read."""
        node, rows = event.node, event.rows_after
        columns = [column for column in node.writes if (node.name, column) in self.wanted]
        sizes = self.controller.bytes_of(rows, columns)
        cost = self.controller.exchange(sizes, event.holders_after)
        self.clock = max(self.clock, float(self.walk.clocks[list(node.layout.ranks)].max())) + cost.seconds
        self.walk.move(node.name, cost, self.held_bytes)
        self.held_bytes += int(sizes.sum())
