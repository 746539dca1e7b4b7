"""Settings that nothing would follow, and layouts that leave ranks or rows without work."""

from __future__ import annotations

from itertools import product

from leaderless.algorithms.settings import CriticConfig
from leaderless.config import RecipeError, nearest
from leaderless.config.rollout import MAX_RESPONSES
from leaderless.planner.checks.capabilities import Draft, check_axes
from leaderless.planner.graph.schedule import is_expanded, keeps_groups
from leaderless.planner.plan_parts import answering
from leaderless.planner.workflow.reward_stages import scored_before


def check_responses(draft: Draft) -> None:
    """All samples of a prompt have an id."""
    num_samplers, siblings = sum(node.spec.samples for node in draft.nodes), draft.recipe.batch.responses_per_prompt
    if num_samplers > 1 and num_samplers * (siblings + 1) > MAX_RESPONSES:
        raise RecipeError.at(
            "batch.responses_per_prompt",
            f"is {siblings}, and {num_samplers} nodes sample as many each: set at most "
            f"{MAX_RESPONSES // num_samplers - 1}",
        )


def check_references(draft: Draft) -> None:
    """A row of a dataset has the scores of a single reference."""
    scored = {role: node.name for node in draft.nodes if (role := scored_before(draft.recipe, node.node))}
    if len(scored) > 1:
        (one, first), (other, second), *_ = scored.items()
        raise RecipeError.at(
            f"nodes.{second}",
            f"reads scores of the reference '{other}', but node '{first}' reads those of '{one}', and a row has the "
            "scores of one reference: train the roles in runs of their own",
        )


def check_players(draft: Draft) -> None:
    """Every agent is played by a role that samples."""
    sampling = {node.node.role for node in draft.nodes if node.spec.samples}
    for agent, role in draft.recipe.players.items():
        if role not in sampling:
            raise RecipeError.at(
                f"environment.agents.{agent}",
                f"is role '{role}'{nearest(role, [name for name in sampling if name])}, which no node of the workflow "
                "samples with: name one that does, or add a node that runs 'play_on' with it",
            )


def check_online(draft: Draft) -> None:
    """Clients ask one role."""
    sampling = [f"'{node.name}'" for node in draft.nodes if node.spec.samples]
    if draft.recipe.online is not None and len(sampling) != 1:
        nobody = f"no node of the workflow '{draft.recipe.workflow}' samples"
        found = f"nodes {', '.join(sampling)} sample" if sampling else nobody
        raise RecipeError.at(
            "online", f"lets clients ask one role, but {found}: use a workflow with one rollout, such as grpo"
        )


def check_idle_ranks(draft: Draft) -> None:
    """Every rank runs a node."""
    busy = {rank for node in draft.nodes for rank in node.layout.ranks}
    idle = sorted(set(range(draft.cluster.world_size)) - busy)
    if idle:
        fewer = f"start {len(busy)} workers or " if max(busy) < idle[0] else ""
        raise RecipeError.at("layout", f"rank {idle[0]} runs no node: {fewer}give every rank a node")


def check_layouts(draft: Draft) -> None:
    """A layout is one that the node's model can have, and each of its shards has rows."""
    recipe, prompts = draft.recipe, draft.recipe.batch.prompts_per_step
    # A layout that is written is blamed before one that follows from it.
    for node in sorted(draft.nodes, key=lambda node: node.name not in recipe.layout):
        layout = node.layout
        check_axes(recipe, node)
        siblings = recipe.batch.responses_per_prompt
        if not is_expanded(draft.nodes, node.row_set) or keeps_groups(recipe, draft.nodes, node.row_set, layout):
            siblings = 1
        if prompts * siblings < layout.dp:
            raise RecipeError.at(
                "batch.prompts_per_step",
                f"is {prompts}{f' with {siblings} responses each' * (siblings > 1)}, fewer than the {layout.dp} "
                f"data-parallel ranks of node '{node.name}', so that some would have nothing to do: "
                f"set at least {-(-layout.dp // siblings)}, or start fewer workers",
            )
        if recipe.has_episodes and "generate" in node.spec.roles.values() and layout.ranks_per_shard > 1:
            raise RecipeError.at(
                f"layout.{node.name}",
                f"lets {layout.ranks_per_shard} ranks make one engine, but with an environment or `online` each rank "
                "plays its own episodes, and ranks of one engine would have to ask for the same at the same time: "
                "leave out tp, or the environment",
            )


def check_evaluation(draft: Draft) -> None:
    """A language model answers held-out prompts."""
    recipe, role = draft.recipe, draft.recipe.evaluation.role
    are_pairs = recipe.data.preferences == "pairs"
    if recipe.evaluation.every_steps and not are_pairs and all(one.is_critic for one in draft.instances):
        raise RecipeError.at(
            "evaluation.every_steps",
            f"is {recipe.evaluation.every_steps}, but the workflow '{draft.workflow.name}' has no language model that "
            "could answer held-out prompts: set it to 0",
        )
    able = {instance.role for instance in draft.instances if not (instance.is_critic or instance.is_judge)}
    if role is not None and role not in able:
        raise RecipeError.at(
            "evaluation.role",
            f"is '{role}', but no node that runs in the workflow '{draft.workflow.name}' uses a language model of this "
            f"name{nearest(role, able)}",
        )


def check_role_settings(draft: Draft) -> None:
    """Settings of a role apply to something that the role does."""
    recipe, known = draft.recipe, {instance.role for instance in draft.instances}
    for role, config in recipe.roles.items():
        if role not in known:
            where = f"no node that runs in the workflow '{draft.workflow.name}' has this role"
            raise RecipeError.at(f"roles.{role}", where + nearest(role, known))
        mine = [one for one in draft.instances if one.role == role]
        is_trained, samples = any(x.is_trained for x in mine), any(x.has_engine for x in mine)
        is_asked = bool(recipe.evaluation.every_steps)
        answers = is_asked and role == answering(draft.instances, recipe.evaluation.role).role
        for name, is_followed, why in (
            ("optimizer", is_trained, f"no node trains role '{role}'"),
            ("rollout", samples or answers, f"no node samples with role '{role}', and it is not evaluated"),
            ("algorithm", is_trained or samples, f"no node samples with role '{role}' or trains it"),
        ):
            if getattr(config, name) and not is_followed:
                raise RecipeError.at(f"roles.{role}.{name}", f"does nothing: {why}: leave it out")


def check_role_advantages(draft: Draft) -> None:
    """A role has no advantage of its own, or penalty in its rewards, where advantages belong to several roles."""
    recipe = draft.recipe
    for role, config in recipe.roles.items():
        own, general = config.algorithm, recipe.algorithm
        computing = (node for node in draft.nodes if "advantages" in node.writes and node.spec.role_use == "none")
        if own is None or any(node.settings_of(recipe).algorithm in (own, own.corrected()) for node in computing):
            continue
        is_penalized = own.is_penalized_in_reward and own.kl != general.kl
        if is_penalized or own.advantage != general.advantage:
            key = "kl" if is_penalized else "advantage"
            raise RecipeError.at(
                f"roles.{role}.algorithm.{key}",
                f"does nothing: no node computes advantages of samples of role '{role}' alone: set algorithm.{key}"
                + (f", or roles.{role}.algorithm.kl.place=loss" if is_penalized else ""),
            )


def check_critic(draft: Draft) -> None:
    """Settings of a critic are for workflows that train one."""
    trained = [instance for instance in draft.instances if instance.is_trained]
    if not trained or any(instance.is_critic for instance in trained):
        return
    own = {f"roles.{role}.": config.algorithm for role, config in draft.recipe.roles.items() if config.algorithm}
    places, fields = {"": draft.recipe.algorithm} | own, CriticConfig.model_fields
    for (place, algorithm), (name, field) in product(places.items(), fields.items()):
        value = getattr(algorithm.critic, name)
        if value != field.default:
            raise RecipeError.at(
                f"{place}algorithm.critic.{name}",
                f"is {value}, but no node of the workflow '{draft.workflow.name}' trains a critic: leave it out, or "
                "use a workflow that has one, as ppo",
            )
