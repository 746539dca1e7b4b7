"""From a recipe, its workflow and a cluster to the plan: pure and deterministic."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from leaderless.config import Recipe, RecipeError, dump_recipe
from leaderless.planner.flow import DATA, Flow, make_flow
from leaderless.planner.layout import Cluster, make_layouts
from leaderless.planner.memory import estimate_memory
from leaderless.planner.model_size import ModelSize, read_model_size
from leaderless.planner.plan import (
    Action,
    BatchSizes,
    Edge,
    Load,
    Plan,
    PlannedNode,
    Reshard,
    RoleInstance,
    Run,
    SyncWeights,
)
from leaderless.workflow import COLUMNS, Workflow

UNKNOWN_COLUMN_BYTES = 8
"""Assumed size per row of a column that only a user's stage knows."""


def make_plan(recipe: Recipe, workflow: Workflow, cluster: Cluster) -> Plan:
    """Decide what every rank does, and what travels between ranks.

    Args:
        recipe: What the user set.
        workflow: The graph that the recipe names.
        cluster: The ranks there are.

    Raises:
        RecipeError: A contract of the workflow is broken, a layout does not fit, or a model cannot do what is asked.
    """
    flow = make_flow(recipe, workflow)
    layouts = make_layouts(recipe, workflow, cluster)
    nodes = tuple(
        PlannedNode(
            node=node,
            spec=flow.specs[node.name],
            layout=layouts[node.name],
            reads=flow.sources[node.name],
            writes=flow.specs[node.name].writes_of(recipe, node),
            row_set=flow.row_set[node.name],
            row_set_after=flow.row_set_after(node.name),
        )
        for node in flow.order
    )
    _check_idle_ranks(nodes, cluster)
    _check_layouts(recipe, nodes)
    instances = _role_instances(nodes)
    sizes = _model_sizes(recipe, instances)
    longest = _longest_sequence(recipe, flow)
    _check_models(recipe, sizes, longest)
    return Plan(
        recipe_name=recipe.name,
        workflow=workflow.name,
        world_size=cluster.world_size,
        nodes=nodes,
        pruned=flow.pruned,
        edges=_edges(recipe, nodes),
        schedule=_schedule(recipe, nodes, instances),
        instances=instances,
        batch=_batch_sizes(recipe, nodes),
        memory=estimate_memory(recipe, instances, sizes, longest),
        recipe_hash=hashlib.sha256(dump_recipe(recipe).encode()).hexdigest(),
    )


def _check_idle_ranks(nodes: Sequence[PlannedNode], cluster: Cluster) -> None:
    busy = {rank for node in nodes for rank in node.layout.ranks}
    idle = sorted(set(range(cluster.world_size)) - busy)
    if idle:
        raise RecipeError.at(
            "layout", f"rank {idle[0]} runs no node: start {len(busy)} workers or give every rank a node"
        )


def _check_layouts(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """Layouts against what stages need: engines, whole groups, enough rows for every shard."""
    prompts = recipe.batch.prompts_per_step
    for node in nodes:
        layout, key = node.layout, f"layout.{node.name}"
        if node.spec.role_use != "none" and layout.ranks_per_shard > 1:
            raise RecipeError.at(
                key, f"{layout}: models divide their ranks by data parallelism only; leave out tp, pp and cp"
            )
        groups = recipe.layout[node.name].groups if node.name in recipe.layout else "auto"
        if node.spec.needs_whole_groups and groups == "split":
            raise RecipeError.at(
                f"{key}.groups",
                f"is 'split', but stage '{node.node.run}' needs all responses to a prompt on one rank: use 'whole'",
            )
        if prompts < layout.dp:
            raise RecipeError.at(
                "batch.prompts_per_step",
                f"is {prompts}, fewer than the {layout.dp} data-parallel ranks of node '{node.name}', "
                f"so that some would have nothing to do: set at least {layout.dp}, or start fewer workers",
            )


def _role_instances(nodes: Sequence[PlannedNode]) -> tuple[RoleInstance, ...]:
    """The models that nodes use, one for each role and layout."""
    trained: dict[str, PlannedNode] = {}
    for node in nodes:
        role = node.node.role
        if role is None or node.spec.role_use != "train":
            continue
        other = trained.setdefault(role, node)
        if not other.layout.holds_rows_like(node.layout):
            raise RecipeError.at(
                f"layout.{node.name}",
                f"role '{role}' is trained by '{other.name}' on {other.layout} and by '{node.name}' on "
                f"{node.layout}: give both nodes one layout",
            )
    instances: list[RoleInstance] = []
    for node in nodes:
        role = node.node.role
        if role is None or any(x.role == role and x.layout.holds_rows_like(node.layout) for x in instances):
            continue
        peers = [x for x in nodes if x.node.role == role and x.layout.holds_rows_like(node.layout)]
        instances.append(
            RoleInstance(
                role=role,
                layout=node.layout,
                is_trained=any(x.spec.role_use == "train" for x in peers),
                generates=any(x.spec.role_use == "generate" for x in peers),
            )
        )
    return tuple(instances)


def _model_sizes(recipe: Recipe, instances: Sequence[RoleInstance]) -> dict[str, ModelSize | None]:
    sizes: dict[str, ModelSize | None] = {}
    for instance in instances:
        model = recipe.model_of(instance.role)
        if model is None:
            raise RecipeError.at("models", f"must name a model for role '{instance.role}'")
        sizes[instance.role] = read_model_size(model)
    return sizes


def _longest_sequence(recipe: Recipe, flow: Flow) -> int:
    """Tokens of the longest sample: a generated one, or one of the dataset."""
    is_generated = any(flow.specs[node.name].role_use == "generate" for node in flow.order)
    response = recipe.rollout.max_response_tokens if is_generated else recipe.data.max_response_tokens
    return recipe.data.max_prompt_tokens + response


def _check_models(recipe: Recipe, sizes: Mapping[str, ModelSize | None], longest: int) -> None:
    for role, size in sizes.items():
        if size is not None and longest > size.max_positions:
            model = recipe.model_of(role)
            raise RecipeError.at(
                "data.max_prompt_tokens",
                f"a prompt and its response may have {longest} tokens, but the context of role '{role}' "
                f"({model.path if model else ''}) ends at {size.max_positions}: shorten prompts or responses",
            )


def _schedule(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> tuple[Action, ...]:
    """All chain entries in one order. Because every rank keeps it, no two ranks wait for each other crosswise."""
    schedule: list[Action] = list(_loads(nodes))
    for node in nodes:
        schedule.append(Run(node.name))
        schedule.extend(_reshards(recipe, nodes, node))
    for trained in instances:
        if trained.is_trained:
            schedule.extend(
                SyncWeights(trained.role, trained.layout, serving.layout)
                for serving in instances
                if serving.role == trained.role and not serving.is_trained
            )
    return tuple(schedule)


def _loads(nodes: Sequence[PlannedNode]) -> list[Load]:
    """One load for every layout that works on the data's own rows."""
    loads: list[Load] = []
    for node in nodes:
        if node.row_set != DATA or any(load.layout.holds_rows_like(node.layout) for load in loads):
            continue
        peers = [x for x in nodes if x.row_set == DATA and x.layout.holds_rows_like(node.layout)]
        columns = {column for peer in peers for column, source in peer.reads.items() if source == DATA}
        loads.append(Load(node.layout, tuple(sorted(columns))))
    return loads


def _reshards(recipe: Recipe, nodes: Sequence[PlannedNode], source: PlannedNode) -> list[Reshard]:
    """One transfer from a node to every other layout that reads from it."""
    reshards: list[Reshard] = []
    for node in nodes:
        layout = node.layout
        if layout.holds_rows_like(source.layout) or any(x.target_layout.holds_rows_like(layout) for x in reshards):
            continue
        peers = [x for x in nodes if x.layout.holds_rows_like(layout)]
        columns = {c for peer in peers for c, provider in peer.reads.items() if provider == source.name}
        if not columns:
            continue
        readers = [x for x in peers if x.row_set == source.row_set_after]
        keep_groups = any(
            x.spec.needs_whole_groups or (x.name in recipe.layout and recipe.layout[x.name].groups == "whole")
            for x in readers
        )
        reshards.append(
            Reshard(source.name, source.row_set_after, tuple(sorted(columns)), source.layout, layout, keep_groups)
        )
    return reshards


def _edges(recipe: Recipe, nodes: Sequence[PlannedNode]) -> tuple[Edge, ...]:
    layouts = {node.name: node.layout for node in nodes}
    edges: list[Edge] = []
    for node in nodes:
        for source in sorted(set(node.reads.values())):
            columns = tuple(column for column, provider in node.reads.items() if provider == source)
            is_local = source == DATA or layouts[source].holds_rows_like(node.layout)
            edges.append(
                Edge(
                    source,
                    node.name,
                    columns,
                    "local" if is_local else "reshard",
                    sum(_max_bytes(recipe, column, node.row_set) for column in columns),
                )
            )
    return tuple(edges)


def _max_bytes(recipe: Recipe, name: str, row_set: str) -> int:
    """Bytes of a column over all ranks, every sequence as long as it may be."""
    prompts = recipe.batch.prompts_per_step
    samples = prompts if row_set == DATA else prompts * recipe.batch.responses_per_prompt
    column = COLUMNS.get(name)
    if column is None:
        return samples * UNKNOWN_COLUMN_BYTES
    rows = prompts if column.is_prompt else samples
    if column.axis is None:
        return rows * column.item_bytes
    if column.axis == "prompt_tokens":
        longest = recipe.data.max_prompt_tokens
    else:
        longest = recipe.data.max_response_tokens if row_set == DATA else recipe.rollout.max_response_tokens
    return rows * longest * column.item_bytes


def _batch_sizes(recipe: Recipe, nodes: Sequence[PlannedNode]) -> BatchSizes:
    batch = recipe.batch
    is_expanded = any(node.spec.rows == "expand" for node in nodes)
    per_prompt = batch.responses_per_prompt if is_expanded else 1
    per_update = -(-batch.prompts_per_step // batch.updates_per_step)
    shards = max(node.layout.dp for node in nodes if node.row_set == DATA)
    return BatchSizes(
        prompts_per_step=batch.prompts_per_step,
        samples_per_step=batch.prompts_per_step * per_prompt,
        prompts_per_update=per_update,
        samples_per_update=per_update * per_prompt,
        max_prompts_per_rank=-(-batch.prompts_per_step // shards),
        optimizer_steps=recipe.steps * batch.updates_per_step,
    )
