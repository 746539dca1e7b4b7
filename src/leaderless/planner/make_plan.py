"""From a recipe, its workflow and a cluster to the plan: pure and deterministic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.planner import checks
from leaderless.planner.checks.capabilities import Draft
from leaderless.planner.graph.column_flow import ColumnFlow
from leaderless.planner.graph.judges import check_context, check_judges, check_judging, with_judges
from leaderless.planner.graph.loops import edges_of, make_loops, with_staleness
from leaderless.planner.graph.row_sets import DATA
from leaderless.planner.graph.teachers import check_teachers, with_teachers
from leaderless.planner.layout import Cluster, Layout, make_layouts, most_prompts_of_rank
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.model_size import read_model_size
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import BatchSizes, PlannedNode, RoleInstance
from leaderless.planner.workflow import Node, Workflow, spec_of
from leaderless.planner.workflow.reward_stages import longest_pair, scored_before
from leaderless.planner.workflow.stage_spec import AnyUse


def make_plan(recipe: Recipe, workflow: Workflow, cluster: Cluster) -> Plan:
    """Decide what every rank does, and what is sent between ranks.

    Raises:
        RecipeError: A contract of the workflow is broken, a layout does not fit, or a model cannot do what is asked.
    """
    check_judges(recipe, workflow)
    check_teachers(recipe, workflow)
    written, flow = workflow, ColumnFlow(recipe, with_teachers(recipe, with_judges(recipe, workflow)))
    workflow = flow.workflow
    _check_roles(recipe, workflow)
    layouts = make_layouts(recipe, workflow, cluster)
    nodes = tuple(
        PlannedNode(
            node=node,
            spec=flow.specs[node.name],
            layout=layouts[node.name],
            reads=_reads(flow, layouts, node.name),
            writes=flow.writes[node.name],
            row_set=flow.row_set[node.name],
            row_set_after=flow.row_set_after(node.name),
        )
        for node in flow.order
    )
    draft = Draft(recipe, workflow, cluster, nodes)
    _refuse(draft, checks.OF_NODES)
    instances = _role_instances(recipe, nodes, cluster.engine)
    draft = replace(draft, instances=instances)
    _refuse(draft, checks.OF_MODELS)
    sizes = _model_sizes(recipe, instances)
    _refuse(replace(draft, sizes=sizes), checks.OF_SIZES)
    nodes = tuple(_with_cost(node, sizes) for node in nodes)
    batch = _batch_sizes(recipe, nodes, instances)
    loops, channels = make_loops(recipe, nodes, instances, workflow.repeated)
    check_judging(recipe, instances, loops)
    nodes = with_staleness(recipe, nodes, loops, channels, workflow.repeated)
    plan = Plan(
        recipe_name=recipe.name,
        workflow=workflow.name,
        world_size=cluster.world_size,
        nodes=nodes,
        pruned=flow.pruned,
        edges=edges_of(recipe, nodes, loops),
        loops=loops,
        channels=channels,
        instances=instances,
        batch=batch,
        sizes=sizes,
        memory=None,
        recipe_hash=hashlib.sha256(json.dumps(recipe.model_dump(mode="json")).encode()).hexdigest(),
        engine=cluster.engine,
        layout=recipe.layout,
        graph=written,
    )
    return replace(plan, memory=estimate_memory(recipe, plan, batch.micro_batch_tokens))


def _refuse(draft: Draft, contracts: Sequence[checks.Check]) -> None:
    for check in contracts:
        check(draft)


def _reads(flow: ColumnFlow, layouts: Mapping[str, Layout], name: str) -> dict[str, str]:
    """The columns of a node; those that it can do without are not sent to other ranks for its sake."""
    optional, layout = flow.specs[name].reads_if_written, layouts[name]
    return {
        column: source
        for column, source in flow.sources[name].items()
        if column not in optional or source == DATA or layouts[source].holds_rows_like(layout)
    }


def _check_roles(recipe: Recipe, workflow: Workflow) -> None:
    """Refuse models of misspelled roles, which would be left out silently, and roles with two heads."""
    users: dict[str, tuple[Node, bool]] = {}
    for node in workflow.nodes:
        for name, role in node.roles:
            is_critic = name in spec_of(node).critics
            other, was_critic = users.setdefault(role, (node, is_critic))
            if is_critic != was_critic:
                critic, other = (node, other) if is_critic else (other, node)
                raise RecipeError.at(
                    f"nodes.{node.name}.role",
                    f"role '{role}' is a critic for node '{critic.name}' ({critic.run}) and a language model for "
                    f"node '{other.name}' ({other.run}): give them different roles",
                )
    roles = {role for node in workflow.nodes for _, role in node.roles}
    roles |= {reference for node in workflow.nodes if (reference := scored_before(recipe, node)) is not None}
    for role in recipe.models:
        if role not in roles:
            raise RecipeError.at(
                f"models.{role}", f"no node of the workflow '{workflow.name}' has this role{nearest(role, roles)}"
            )


def _role_instances(recipe: Recipe, nodes: Sequence[PlannedNode], engine: str) -> tuple[RoleInstance, ...]:
    """The models of a workflow; `engine` generates where the recipe leaves it open."""
    trained: dict[str, PlannedNode] = {}
    for node, role in [(one, role) for one in nodes for role, use in one.uses if use == "train"]:
        other = trained.setdefault(role, node)
        if not other.layout.holds_rows_like(node.layout):
            raise RecipeError.at(
                f"layout.{node.name}",
                f"role '{role}' is trained by '{other.name}' on {other.layout} and by '{node.name}' on "
                f"{node.layout}: give both nodes one layout",
            )
    users: dict[tuple[str, tuple[int, ...]], list[tuple[PlannedNode, AnyUse]]] = {}
    for node in nodes:
        for role, use in node.uses:
            users.setdefault((role, node.layout.ranks), []).append((node, use))
    return tuple(
        _instance(recipe, role, peers, engine, is_followed=role in trained) for (role, _), peers in users.items()
    )


def _instance(
    recipe: Recipe, role: str, users: Sequence[tuple[PlannedNode, AnyUse]], engine: str, *, is_followed: bool
) -> RoleInstance:
    """The model of a role on some ranks, for the nodes there and their uses; a trained role is followed by others."""
    asking = ("generate", "judge")
    engine_layout = _layout_of(role, [node for node, use in users if use in asking], "generates")
    held = _layout_of(role, [node for node, use in users if use not in asking], "is divided")
    layout = held or engine_layout
    assert layout is not None, "an instance has users"
    is_engine_only = held is None and is_followed
    named = recipe.as_seen_by(role).rollout.engine
    return RoleInstance(
        role=role,
        # An engine that nothing sends weights to gets them from a frozen model next to it.
        layout=layout if held or is_engine_only else layout.flat,
        engine_layout=engine_layout,
        is_trained=any(use == "train" for _, use in users),
        scores=any(use == "score" for _, use in users),
        is_critic=any(node.spec.is_critic(node.node, role) for node, _ in users),
        num_updates=sum(
            node.spec.num_updates(node.settings_of(recipe), node.node) for node, use in users if use == "train"
        ),
        engine=engine if named == "auto" else named,
        is_engine_only=is_engine_only,
        is_judge=any(use == "judge" for _, use in users),
        teaches=any(use == "score" and node.node.run == "distill" for node, use in users),
    )


def _layout_of(role: str, nodes: Sequence[PlannedNode], what: str) -> Layout | None:
    """The layout that nodes of a role share on their ranks; None without nodes."""
    for node in nodes:
        if node.layout != nodes[0].layout:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"role '{role}' {what} as {nodes[0].layout} for '{nodes[0].name}' and as {node.layout} for "
                f"'{node.name}': give both nodes one layout, or other ranks",
            )
    return nodes[0].layout if nodes else None


def _model_sizes(recipe: Recipe, instances: Sequence[RoleInstance]) -> dict[str, ModelSize | None]:
    """The size of each role's model; None where it is not known."""
    sizes: dict[str, ModelSize | None] = {}
    longest = longest_sequence(recipe, instances)
    for instance in instances:
        model = recipe.model_of(instance.role)
        if model is None:
            hint = nearest(instance.role, recipe.models)
            raise RecipeError.at("models", f"must name a model for role '{instance.role}'{hint}")
        size = read_model_size(model, f"models.{instance.role}", is_critic=instance.is_critic)
        if size is not None and instance.is_judge:
            check_context(recipe, instance.role, size.max_positions)
        elif size is not None and longest > size.max_positions:
            raise RecipeError.at(
                "data.max_prompt_tokens",
                f"a prompt and its response may have {longest} tokens, but the context of role '{instance.role}' "
                f"({model.name}) ends at {size.max_positions}: shorten prompts or responses",
            )
        sizes[instance.role] = size
    return sizes


def _with_cost(node: PlannedNode, sizes: Mapping[str, ModelSize | None]) -> PlannedNode:
    """A node that knows what long sequences cost its model: the one that it trains, or else the first of known size."""
    uses = (use for use in node.uses if use[1] != "judge")  # how long questions are does not follow from rows
    trained_first = sorted(uses, key=lambda use: use[1] != "train")
    known = (size for role, _ in trained_first if (size := sizes.get(role)) is not None)
    size = next(known, None)
    return node if size is None else replace(node, quadratic_tokens=size.quadratic_tokens)


def longest_sequence(recipe: Recipe, instances: Sequence[RoleInstance]) -> int:
    """Tokens of the longest sample: a generated one, or one of the dataset; of a body, its steps; or both of a pair."""
    if recipe.body is not None:
        return recipe.body.max_steps
    agents = [instance.role for instance in instances if instance.generates]
    if recipe.data.preferences and not agents:
        return longest_pair(recipe)
    response = recipe.longest_response(agents) if agents else recipe.data.max_response_tokens
    return recipe.data.max_prompt_tokens + response


def longest_part(recipe: Recipe, instances: Sequence[RoleInstance]) -> int:
    """Tokens of the longest sample that are in one rank's part of a pass, for the model with the largest parts.

    Where models of bodies compute passes again in the backward pass, they divide episodes.
    """
    if recipe.body is not None and all(model.gradient_checkpointing for model in recipe.models.values()):
        return 1
    longest = longest_sequence(recipe, instances)
    return max(
        (-(-longest // one.layout.cp) for one in instances if not (one.is_engine_only or one.is_judge)), default=longest
    )


def _batch_sizes(recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> BatchSizes:
    batch, longest_tokens = recipe.batch, longest_part(recipe, instances)
    bound = batch.first_micro_batch_tokens(longest_tokens)
    if bound < longest_tokens and any(one.scores or one.is_trained for one in instances):
        raise RecipeError.at(
            "batch.micro_batch_tokens",
            f"is {bound}, but a rank may have {longest_tokens} tokens of one sample: raise it, or give all nodes that "
            "score or train the same cp under `layout`",
        )
    num_samplers = sum(node.spec.samples for node in nodes)
    per_prompt = batch.responses_per_prompt * num_samplers if num_samplers else 1
    per_update = -(-batch.prompts_per_step // batch.parts_per_step)
    num_shards = min(node.layout.dp for node in nodes if node.row_set == DATA)
    return BatchSizes(
        prompts_per_step=batch.prompts_per_step,
        samples_per_step=batch.prompts_per_step * per_prompt,
        prompts_per_update=per_update,
        samples_per_update=per_update * per_prompt,
        max_prompts_per_rank=most_prompts_of_rank(recipe, num_shards),
        optimizer_steps=recipe.steps * batch.updates_per_step,
        micro_batch_tokens=bound,
        adapts_to_memory=batch.micro_batch_tokens == "auto",
    )
