"""The entries of a plan's schedule with their rows and their seconds, but for those of moving data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from leaderless.config import Recipe, RecipeError
from leaderless.planner import Load, Loop, Plan, PlannedNode, Reshard, RunNode, SyncWeights, Windowed, flat
from leaderless.planner.costs.compute import ModelCost, tokenizing_seconds
from leaderless.planner.costs.network import Float, Network
from leaderless.planner.costs.placement import Placement, Routes, sending_ranks
from leaderless.planner.costs.rows import Int, Rows, Workload
from leaderless.planner.model_size import ModelSize, read_model_size


@dataclass(frozen=True)
class Loaded:
    """Prompts loaded by a layout.

    Attributes:
        action: Entry of the schedule.
        rows: The prompts.
        seconds: [dp] seconds of each shard, where it loads its own.
        holders: [n] rank that sends each row.
    """

    action: Load
    rows: Rows
    seconds: Float
    holders: Int


@dataclass(frozen=True)
class Worked:
    """A node that has run.

    Attributes:
        node: The node.
        rows: Rows that it was given.
        holders: [n] rank that sends each of these rows.
        rows_after: Rows that it puts out.
        holders_after: [n] rank that sends each of those.
        seconds: [dp] seconds of each shard, once all ranks of the node have begun.
    """

    node: PlannedNode
    rows: Rows
    holders: Int
    rows_after: Rows
    holders_after: Int
    seconds: Float

    @property
    def uses_model(self) -> bool:
        """Whether it runs where a model is."""
        return self.node.spec.role_use != "none"


@dataclass(frozen=True)
class Moved:
    """Rows sent to another layout."""

    action: Reshard
    routes: Routes


@dataclass(frozen=True)
class Synced:
    """Weights sent to another layout."""

    action: SyncWeights
    num_parameters: int


Event = Loaded | Worked | Moved | Synced


def events_of(plan: Plan, recipe: Recipe, workload: Workload, network: Network) -> tuple[Event, ...]:
    """What happens in one step, in the order of the plan.

    Args:
        plan: Plan of the recipe.
        recipe: Batch sizes and models.
        workload: Rows of the step.
        network: Links between the ranks.

    Raises:
        RecipeError: The workflow has a loop, or the size of a model is not known.
    """
    return tuple(_events(plan, model_costs(plan, recipe, network), Placement(plan, workload), network))


def _events(
    plan: Plan, models: Mapping[tuple[str, tuple[int, ...]], ModelCost], placement: Placement, network: Network
) -> Iterator[Event]:
    for action in flat(plan.schedule):
        match action:
            case Load(layout, _):
                shards = placement.load(action)
                rows = placement.workload.prompts
                rate = network.cluster.dataloader.tokens_per_s
                yield Loaded(
                    action, rows, tokenizing_seconds(rows, rate, shards, layout.dp), sending_ranks(shards, layout)
                )
            case RunNode(name):
                yield _work(plan[name], models, placement)
            case Reshard():
                yield Moved(action, placement.reshard(action))
            case SyncWeights():
                yield Synced(action, models[action.role, action.source_layout.ranks].size.num_parameters)
            case Windowed():  # overlap is not modeled: its entries follow each other
                continue
            case Loop():
                raise RecipeError.at(
                    "workflow",
                    f"'{plan.workflow}' has a loop, and how often it goes round depends on rewards, which a "
                    "simulation does not know: simulate a workflow without one, as grpo",
                )


def _work(node: PlannedNode, models: Mapping[tuple[str, tuple[int, ...]], ModelCost], placement: Placement) -> Worked:
    rows, shards = placement.rows(node.row_set), placement.shards(node.row_set, node.layout)
    after, shards_after = placement.rows(node.row_set_after), placement.run(node)
    took = np.zeros(node.layout.dp)
    if node.spec.role_use != "none":
        assert node.node.role is not None, "the planner refuses a model's stage without a role"
        model = models[node.node.role, node.layout.ranks]
        match node.spec.role_use:
            case "generate":
                took = model.generation_seconds(after, shards_after)
            case "score":
                took = took + model.scoring_seconds(rows, shards)
            case "train":
                took = took + model.training_seconds(rows, shards)
    holders, holders_after = sending_ranks(shards, node.layout), sending_ranks(shards_after, node.layout)
    return Worked(node, rows, holders, after, holders_after, took)


def model_costs(plan: Plan, recipe: Recipe, network: Network) -> dict[tuple[str, tuple[int, ...]], ModelCost]:
    """The cost of every model, by its role and ranks.

    Args:
        plan: Plan of the recipe.
        recipe: Recipe with the models.
        network: Links between the ranks.

    Raises:
        RecipeError: The size of a model is not known.
    """
    costs: dict[tuple[str, tuple[int, ...]], ModelCost] = {}
    sizes: dict[str, ModelSize | None] = {}
    for instance in plan.instances:
        model = recipe.model_of(instance.role)
        assert model is not None, "the planner refuses a role without a model"
        key = f"models.{instance.role}" if instance.role in recipe.models else "models.policy"
        if instance.role not in sizes:
            sizes[instance.role] = read_model_size(model, key, is_critic=instance.is_critic)
        size = sizes[instance.role]
        if size is None:
            raise RecipeError.at(
                key,
                f"the size of '{model.path}' is not known, because its config.json is not on this machine or is of no "
                "known family: name a folder that holds one",
            )
        costs[instance.role, instance.layout.ranks] = ModelCost(size, model, instance.layout, network, recipe)
    return costs
