"""From a recipe, its workflow and a cluster to the plan: pure and deterministic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.algorithm import CriticConfig
from leaderless.config.rollout import MAX_RESPONSES
from leaderless.planner.adapters import check_adapters, companions_of
from leaderless.planner.backends import check_axes, check_backends, check_heads
from leaderless.planner.edges import edges_of
from leaderless.planner.engines import check_engines
from leaderless.planner.families import check_divisible
from leaderless.planner.flow import Flow
from leaderless.planner.judges import check_context, check_judges, check_judging, with_judges
from leaderless.planner.layout import Cluster, Layout, make_layouts, most_prompts_of_rank
from leaderless.planner.loops import make_loops, with_staleness
from leaderless.planner.memory import estimate_memory
from leaderless.planner.model_size import ModelSize, read_model_size
from leaderless.planner.parts import BatchSizes, PlannedNode, RoleInstance, answering
from leaderless.planner.plan import Plan
from leaderless.planner.replay import check_experts_settings
from leaderless.planner.row_sets import DATA
from leaderless.planner.schedule import is_expanded, keeps_groups
from leaderless.planner.sight import check_sight
from leaderless.planner.vocabulary import check_vocabularies
from leaderless.workflow import Node, Workflow, spec_of
from leaderless.workflow.preference_stages import longest_pair, scored_before
from leaderless.workflow.stage import AnyUse

_CRITIC_FIELDS = tuple(CriticConfig.model_fields.items())


def make_plan(recipe: Recipe, workflow: Workflow, cluster: Cluster) -> Plan:
    """Decide what every rank does, and what is sent between ranks.

    Args:
        recipe: Settings of the user.
        workflow: The graph that the recipe names.
        cluster: The ranks there are.

    Raises:
        RecipeError: A contract of the workflow is broken, a layout does not fit, or a model cannot do what is asked.
    """
    check_judges(recipe, workflow)
    flow = Flow(recipe, with_judges(recipe, workflow))
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
    _check_responses(recipe, nodes)
    _check_references(recipe, nodes)
    _check_players(recipe, nodes)
    _check_online(recipe, nodes)
    _check_idle_ranks(nodes, cluster)
    _check_layouts(recipe, nodes)
    instances = _role_instances(recipe, nodes, cluster.engine)
    _check_evaluation(recipe, workflow, instances)
    _check_role_settings(recipe, workflow, instances)
    _check_role_advantages(recipe, nodes)
    check_backends(recipe, instances)
    _check_critic(recipe, workflow, instances)
    check_engines(recipe, instances, nodes)
    _check_vllm(recipe, instances, cluster)
    check_sight(recipe, nodes, instances)
    check_divisible(recipe, nodes, instances)
    sizes = _model_sizes(recipe, instances)
    check_heads(recipe, nodes, instances, sizes)
    check_adapters(recipe, instances, sizes)
    check_experts_settings(recipe, instances, sizes)
    check_vocabularies(recipe, nodes)
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
    )
    return replace(plan, memory=estimate_memory(recipe, plan, batch.micro_batch_tokens))


def _reads(flow: Flow, layouts: Mapping[str, Layout], name: str) -> dict[str, str]:
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


def _check_vllm(recipe: Recipe, instances: Sequence[RoleInstance], cluster: Cluster) -> None:
    """Inside the ranks' processes, vLLM needs exactly one engine on every rank, which roles with adapters may share."""
    generating = [
        instance
        for instance in instances
        if instance.has_engine
        and instance.engine == "vllm"
        and recipe.as_seen_by(instance.role).rollout.external.python is None
    ]
    some = next((instance for instance in generating if len(instance.layout.ranks) < cluster.world_size), None)
    if len(generating) > 1 and len(companions_of(recipe, instances, generating[0])) < len(generating):
        roles = " and ".join(f"'{instance.role}'" for instance in generating)
        problem = f"several roles generate ({roles}): a process holds one vLLM"
    elif some is not None:
        problem = (
            f"not all ranks generate: '{some.role}' does so on {some.layout} of {cluster.world_size}, and vLLM inside "
            "of the ranks' processes needs all of them"
        )
    else:
        return
    role = generating[-1].role
    message = f"must be given where {problem}; or set {recipe.key_of('rollout.engine', role)}=native"
    raise RecipeError.at(recipe.key_of("rollout.external.python", role), message)


def _check_responses(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """All samples of a prompt have an id."""
    num_samplers, siblings = sum(node.spec.samples for node in nodes), recipe.batch.responses_per_prompt
    if num_samplers > 1 and num_samplers * (siblings + 1) > MAX_RESPONSES:
        raise RecipeError.at(
            "batch.responses_per_prompt",
            f"is {siblings}, and {num_samplers} nodes sample as many each: set at most "
            f"{MAX_RESPONSES // num_samplers - 1}",
        )


def _check_players(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """Every agent is played by a role that samples."""
    sampling = {node.node.role for node in nodes if node.spec.samples}
    for agent, role in recipe.players.items():
        if role not in sampling:
            raise RecipeError.at(
                f"environment.agents.{agent}",
                f"is role '{role}'{nearest(role, [name for name in sampling if name])}, which no node of the workflow "
                "samples with: name one that does, or add a node that runs 'play_on' with it",
            )


def _check_online(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """Clients ask one role."""
    sampling = [node for node in nodes if node.spec.samples]
    if recipe.online is None or len(sampling) == 1:
        return
    names = ", ".join(f"'{node.name}'" for node in sampling)
    found = f"nodes {names} sample" if sampling else f"no node of the workflow '{recipe.workflow}' samples"
    raise RecipeError.at(
        "online", f"lets clients ask one role, but {found}: use a workflow with one rollout, such as grpo"
    )


def _check_idle_ranks(nodes: Sequence[PlannedNode], cluster: Cluster) -> None:
    busy = {rank for node in nodes for rank in node.layout.ranks}
    idle = sorted(set(range(cluster.world_size)) - busy)
    if idle:
        fewer = f"start {len(busy)} workers or " if max(busy) < idle[0] else ""
        raise RecipeError.at("layout", f"rank {idle[0]} runs no node: {fewer}give every rank a node")


def _check_layouts(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    prompts = recipe.batch.prompts_per_step
    # A layout that is written is blamed before one that follows from it.
    for node in sorted(nodes, key=lambda node: node.name not in recipe.layout):
        layout = node.layout
        check_axes(recipe, node)
        siblings = recipe.batch.responses_per_prompt
        if not is_expanded(nodes, node.row_set) or keeps_groups(recipe, nodes, node.row_set, layout):
            siblings = 1
        if prompts * siblings < layout.dp:
            raise RecipeError.at(
                "batch.prompts_per_step",
                f"is {prompts}{f' with {siblings} responses each' * (siblings > 1)}, fewer than the {layout.dp} "
                f"data-parallel ranks of node '{node.name}', so that some would have nothing to do: "
                f"set at least {-(-layout.dp // siblings)}, or start fewer workers",
            )
        plays = recipe.has_episodes and "generate" in node.spec.roles.values()
        if plays and layout.ranks_per_shard > 1:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"lets {layout.ranks_per_shard} ranks make one engine, but with an environment or `online` each rank "
                "plays its own episodes, and ranks of one engine would have to ask for the same at the same time: "
                "leave out tp, or the environment",
            )


def _check_critic(recipe: Recipe, workflow: Workflow, instances: Sequence[RoleInstance]) -> None:
    trained = [instance for instance in instances if instance.is_trained]
    if not trained or any(instance.is_critic for instance in trained):
        return
    own = {f"roles.{role}.": config.algorithm for role, config in recipe.roles.items() if config.algorithm}
    for (place, algorithm), (name, field) in product(({"": recipe.algorithm} | own).items(), _CRITIC_FIELDS):
        value = getattr(algorithm.critic, name)
        if value != field.default:
            raise RecipeError.at(
                f"{place}algorithm.critic.{name}",
                f"is {value}, but no node of the workflow '{workflow.name}' trains a critic: leave it out, or use a "
                "workflow that has one, as ppo",
            )


def _check_role_settings(recipe: Recipe, workflow: Workflow, instances: Sequence[RoleInstance]) -> None:
    """Refuse settings of roles that nothing would read."""
    known = {instance.role: [x for x in instances if x.role == instance.role] for instance in instances}
    for role, config in recipe.roles.items():
        mine = known.get(role)
        if mine is None:
            hint = nearest(role, known)
            raise RecipeError.at(
                f"roles.{role}", f"no node that runs in the workflow '{workflow.name}' has this role{hint}"
            )
        is_trained, samples = any(x.is_trained for x in mine), any(x.has_engine for x in mine)
        if config.optimizer and not is_trained:
            raise RecipeError.at(f"roles.{role}.optimizer", f"does nothing: no node trains role '{role}': leave it out")
        is_evaluated = bool(recipe.evaluation.every_steps) and role == answering(instances, recipe.evaluation.role).role
        if config.rollout and not samples and not is_evaluated:
            raise RecipeError.at(
                f"roles.{role}.rollout",
                f"does nothing: no node samples with role '{role}', and it is not evaluated: leave it out",
            )
        if config.algorithm and not is_trained and not samples:
            raise RecipeError.at(
                f"roles.{role}.algorithm",
                f"does nothing: no node samples with role '{role}' or trains it: leave it out",
            )


def _check_references(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """Refuse several references of one dataset, whose rows have the scores of a single one."""
    scored = {role: node.name for node in nodes if (role := scored_before(recipe, node.node))}
    if len(scored) > 1:
        (one, first), (other, second), *_ = scored.items()
        raise RecipeError.at(
            f"nodes.{second}",
            f"reads scores of the reference '{other}', but node '{first}' reads those of '{one}', and a row has the "
            "scores of one reference: train the roles in runs of their own",
        )


def _check_role_advantages(recipe: Recipe, nodes: Sequence[PlannedNode]) -> None:
    """Refuse an advantage of a role, or a penalty in its rewards, where advantages are those of several roles."""
    for role, config in recipe.roles.items():
        own, general = config.algorithm, recipe.algorithm
        computing = (node for node in nodes if "advantages" in node.writes and node.spec.role_use == "none")
        if own is None or any(node.settings_of(recipe).algorithm is own for node in computing):
            continue
        is_penalized = own.is_penalized_in_reward and own.kl != general.kl
        if is_penalized or own.advantage != general.advantage:
            key = "kl" if is_penalized else "advantage"
            raise RecipeError.at(
                f"roles.{role}.algorithm.{key}",
                f"does nothing: no node computes advantages of samples of role '{role}' alone: set algorithm.{key}"
                + (f", or roles.{role}.algorithm.kl.place=loss" if is_penalized else ""),
            )


def _check_evaluation(recipe: Recipe, workflow: Workflow, instances: Sequence[RoleInstance]) -> None:
    are_pairs = recipe.data.preferences == "pairs"
    if recipe.evaluation.every_steps and not are_pairs and all(instance.is_critic for instance in instances):
        raise RecipeError.at(
            "evaluation.every_steps",
            f"is {recipe.evaluation.every_steps}, but the workflow '{workflow.name}' has no language model that could "
            "answer held-out prompts: set it to 0",
        )
    role = recipe.evaluation.role
    able = {instance.role for instance in instances if not (instance.is_critic or instance.is_judge)}
    if role is not None and role not in able:
        raise RecipeError.at(
            "evaluation.role",
            f"is '{role}', but no node that runs in the workflow '{workflow.name}' uses a language model of this name"
            f"{nearest(role, able)}",
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
