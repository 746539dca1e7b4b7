"""The contracts of the built-in stages; their code is elsewhere, so that planning does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from leaderless.config import RecipeError
from leaderless.config.environment import custom_reader
from leaderless.config.failures import PLAYED_KINDS
from leaderless.config.models import origin_of
from leaderless.config.packaged_files import server_refusal
from leaderless.planner.workflow.columns import (
    BODY_COLUMNS,
    EPISODE_IDS,
    EXPERTS,
    IMAGES,
    LATER_IMAGES,
    PLAY_COLUMNS,
    SEEN_COLUMNS,
    SUPPORT_COLUMNS,
    TAKEN_COLUMNS,
)
from leaderless.planner.workflow.distillation_stages import DISTILLATION_STAGES
from leaderless.planner.workflow.products import agents_of, tools_of
from leaderless.planner.workflow.reward_stages import PREFERENCE_STAGES, REWARD
from leaderless.planner.workflow.stage_spec import STAGES, StageSpec
from leaderless.planner.workflow.training_stages import (
    SEQUENCE,
    TRAINING_STAGES,
    adapted_metrics,
    check_log_probs,
    filter_reads,
    refuse_replay,
    refuse_tasks,
    replayed,
    require_body,
)

if TYPE_CHECKING:
    from leaderless.config import Recipe
    from leaderless.config.recipe import Product
    from leaderless.planner.workflow.workflow import Node, Workflow


def log_probs_column(node: Node, workflow: Workflow) -> str:
    """Name of the column for log-probabilities under the role of a node; it says whose they are.

    They are the old ones where the role is trained, unless several roles sampled the rows, and the reference's
    where its role is `reference`, or `planner_reference` on rows that `planner` sampled.
    """
    role = node.role
    if role == "reference" or (len(node.agents) == 1 and scored_agent(node) not in {None, role}):
        return "ref_log_probs"
    is_trained = any(other.role == role and spec_of(other).role_use == "train" for other in workflow.nodes)
    return "old_log_probs" if is_trained and len(node.agents) < 2 else f"{role}_log_probs"


def scored_agent(node: Node) -> str | None:
    """The role that sampled the rows of a node's role: the role itself, or the role that it is the reference of.

    None if neither has sampled rows of the node.
    """
    role = node.role or ""
    owner = origin_of(role) if role.endswith("reference") else None
    return next((one for one in (role, owner) if one in node.agents), None)


def _own_log_probs_column(node: Node) -> str:
    is_reference = node.role not in node.agents and origin_of(node.role or "") is not None
    return "ref_log_probs" if is_reference else "old_log_probs"


def _advantage_reads(recipe: Recipe, node: Node) -> list[str]:
    columns = ["rewards", "reward_valid", "response_lengths"]
    algorithm = recipe.algorithm
    if algorithm.is_penalized_in_reward:
        columns += ["old_log_probs", "ref_log_probs"]
    if algorithm.advantage.stage == node.run:
        columns += algorithm.advantage.reads
    return list(dict.fromkeys([*columns, *filter_reads(recipe)]))


def _advantage_reads_if_made(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    return [EPISODE_IDS, "turn_rewards", *["turns"] * (recipe.algorithm.overlong.buffer_tokens > 0)]


def _advantage_writes(recipe: Recipe, node: Node, workflow: Workflow) -> list[str]:  # noqa: ARG001
    advantage = recipe.algorithm.advantage
    return ["advantages", *(advantage.writes if advantage.stage == node.run else ())]


def _advantage_sampled_with(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    return ["max_response_tokens"] * (recipe.algorithm.overlong.buffer_tokens > 0)


def _rollout_writes(recipe: Recipe, node: Node, workflow: Workflow) -> list[str]:  # noqa: ARG001
    own = [*ROLLOUT_WRITES, *[EXPERTS] * recipe.algorithm.replay_experts]
    own += [*SUPPORT_COLUMNS] * recipe.samples_truncated
    own += [IMAGES, LATER_IMAGES] * recipe.has_later_images
    return [*own, *ROLLOUTS[recipe.product].writes(recipe)]


def _rollout_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    names = ROLLOUTS[recipe.product].metrics(recipe)
    if recipe.continuous_channels:
        names += [f"generation/{name}" for name in GENERATION_METRICS]
    return names


def _text_metrics(recipe: Recipe) -> list[str]:  # noqa: ARG001
    return [f"rollout/{name}" for name in ("response_tokens", "truncated", "tokens_per_s")]


def _draft_metrics(recipe: Recipe) -> list[str]:
    return ["rollout/drafts_accepted"] * bool(recipe.rollout.num_drafts)


def _episode_metrics(recipe: Recipe) -> list[str]:
    config = recipe.environment
    assert config is not None
    tools, names = tools_of(config), [*_text_metrics(recipe), *_draft_metrics(recipe), *EPISODE_METRICS]
    if tools or config.mcp:
        names += ["episode/tools_s", "tool/calls", "tool/misread"]
        names += [f"tool/{kind}/{tool}" for tool in tools for kind in ("calls", "refused")]
    return names


def _record_reads(recipe: Recipe, node: Node) -> list[str]:
    columns = ["rows", "tokens", "truncated", "rewards", "reward_valid", "reward_details"]
    columns += [IMAGES] * recipe.has_images
    return columns + ["agent"] * (len(node.agents) > 1) + [*ROLLOUTS[recipe.product].recorded]


def _advantage_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    algorithm, names = recipe.algorithm, ["group/no_signal"]
    if algorithm.overlong.buffer_tokens:
        names.append("reward/overlong_penalty")
    if algorithm.is_penalized_in_reward:
        names += ["reward/kl", *adapted_metrics(recipe)]
    return [*names, *algorithm.advantage.metrics]


def _check_sampling(recipe: Recipe) -> None:
    if recipe.rollout.temperature == 0:
        raise RecipeError.at("rollout.temperature", "must be above 0: training needs responses that differ")
    ROLLOUTS[recipe.product].check(recipe)


def _check_environment(recipe: Recipe) -> None:
    config = recipe.environment
    assert config is not None
    tools_of(config)
    custom_reader(config.tool_format)
    if recipe.run.follow is not None and recipe.samples_truncated:
        raise RecipeError.at(
            "run.follow",
            f"is {recipe.run.follow}, but its journal has no tokens that episodes could have had in place of theirs: "
            "leave top_p, top_k and min_p out of `rollout`",
        )


def _check_online(recipe: Recipe) -> None:
    assert recipe.online is not None
    custom_reader(recipe.online.tool_format, "online.tool_format")
    if problem := server_refusal():
        raise RecipeError.at("online", problem)


def _check_greedy(recipe: Recipe, node: Node) -> None:
    refuse_tasks(
        recipe,
        f"cannot be combined with node '{node.name}', which decodes one more response greedily, as no client asks "
        "for it: use a workflow whose node runs 'rollout', such as grpo",
        "online",
    )
    _check_rollout(recipe, node)


def _check_rollout(recipe: Recipe, node: Node) -> None:
    _check_sampling(recipe)
    config = recipe.environment
    if config is not None and config.agents:
        agents = agents_of(config)
        if not agents:
            raise RecipeError.at("environment.agents", "names agents, but a program has only one: leave it out")
        first = agents[0]
        if config.agents[first] != node.role:
            raise RecipeError.at(
                f"environment.agents.{first}",
                f"is role '{config.agents[first]}', but node '{node.name}' begins episodes with role '{node.role}', "
                f"and '{first}' acts first: let that role play it, and others continue in nodes that run 'play_on'",
            )


def _check_play_on(recipe: Recipe, node: Node) -> None:
    _check_sampling(recipe)
    refuse_replay(recipe, node)
    refuse_tasks(
        recipe,
        f"lets clients ask one role, but node '{node.name}' continues what another one has begun: use a workflow "
        "with one rollout, such as grpo",
        "online",
    )
    if node.role not in recipe.players.values():
        raise RecipeError.at(
            "environment.agents",
            f"names no agent of role '{node.role}', which node '{node.name}' lets play: say which role plays each "
            "agent",
        )


def _check_demonstrations(recipe: Recipe, node: Node) -> None:
    if recipe.body is None or recipe.body.demonstrations is None:
        raise RecipeError.at(
            "body.demonstrations", f"must name the folder of demonstrations that node '{node.name}' takes samples of"
        )


def _check_advantage(recipe: Recipe, node: Node) -> None:
    advantage = recipe.algorithm.advantage
    if advantage.stage != node.run:
        raise RecipeError.at(
            "algorithm.advantage.type",
            f"is {advantage.type}, which the stage '{advantage.stage}' computes, but node '{node.name}' runs "
            f"'{node.run}': use a workflow with that stage, or another advantage",
        )
    advantage.check(recipe)
    if recipe.algorithm.overlong.buffer_tokens > recipe.rollout.max_response_tokens:
        raise RecipeError.at("algorithm.overlong.buffer_tokens", "must be at most rollout.max_response_tokens")


def _check_dynamic_sampling(recipe: Recipe, node: Node) -> None:
    if recipe.batch.responses_per_prompt < 2:
        raise RecipeError.at(
            "batch.responses_per_prompt",
            f"must be at least 2: node '{node.name}' keeps groups whose rewards differ",
        )


def _check_own_log_probs(recipe: Recipe, node: Node) -> None:
    check_log_probs(recipe, node)
    refuse_replay(recipe, node)
    if scored_agent(node) is None:
        raise RecipeError.at(
            f"nodes.{node.name}.role",
            f"'{node.role}' has sampled none of the rows before node '{node.name}', and is the reference of no role "
            f"that has: name a role that samples ({', '.join(node.agents)}), or its reference, as "
            f"{node.agents[0] if node.agents else 'planner'}_reference",
        )


EPISODE_METRICS = (
    "rollout/prefix_hits",
    "rollout/engine_busy",
    "episode/turns",
    "episode/tokens",
    "episode/told_tokens",
    "episode/samples",
    "episode/cut",
    "episode/drift",
    "episode/failed",
    *(f"failure/{kind}" for kind in PLAYED_KINDS),
    "episode/repeated",
    "episode/model_s",
    "episode/environment_s",
)
"""Metrics of episodes and of their engine."""
BODY_METRICS = ("success", "steps", "decisions", "truncated", "failed", "steps_per_s")
"""Metrics of a body's episodes, below `body/`."""
GENERATION_METRICS = ("response_tokens", "voided_tokens", "canceled", "deferred", "open")
ONLINE_METRICS = (
    "requests",
    "failed",
    "without_feedback",
    "stale",
    "interrupted",
    "waiting",
    "acceptance",
    "latency_s",
    "latency_p95_s",
    "latency_training_s",
    "latency_training_p95_s",
)
"""Metrics of online runs, below `online/`."""
ROLLOUT_WRITES = (
    "tokens",
    "response_mask",
    "response_lengths",
    "truncated",
    "agent",
    "policy_versions",
    "temperatures",
    "rollout_log_probs",
)


class Rollout(NamedTuple):
    """Columns, reports and refusals that only the rollout of one product has."""

    reads: tuple[str, ...]
    writes: Callable[[Recipe], Sequence[str]]
    metrics: Callable[[Recipe], list[str]]
    recorded: tuple[str, ...] = ()
    values: tuple[str, ...] = ("values",)
    check: Callable[[Recipe], None] = lambda _: None


ROLLOUTS: Mapping[Product, Rollout] = {
    "text": Rollout(
        ("prompt_tokens",),
        lambda _: (),
        lambda recipe: [*_text_metrics(recipe), *_draft_metrics(recipe)],
        ("prompt_tokens",),
    ),
    # Without the mask, an environment's text would be recorded as part of the response.
    "episodes": Rollout(
        ("rows",), lambda _: PLAY_COLUMNS, _episode_metrics, ("response_mask",), check=_check_environment
    ),
    "online": Rollout(
        ("rows",),
        lambda _: PLAY_COLUMNS,
        lambda recipe: [*_text_metrics(recipe), *EPISODE_METRICS, *(f"online/{name}" for name in ONLINE_METRICS)],
        ("response_mask",),
        check=_check_online,
    ),
    "bodies": Rollout(
        ("rows",),
        lambda recipe: [*(TAKEN_COLUMNS if recipe.algorithm.sac else ()), *BODY_COLUMNS],
        lambda _: [f"body/{name}" for name in BODY_METRICS],
        (*SEEN_COLUMNS, "prompt_tokens", "turns", "success"),
        ("values", "final_values"),
    ),
}
ROLLOUT = StageSpec(
    "leaderless.stages.rollout:rollout",
    implementations={
        "episodes": "leaderless.stages.episode_rollout:rollout",
        "continuous": "leaderless.worker.asynchronous.generation:rollout",
        "online": "leaderless.serving.online.rollout:rollout",
        "bodies": "leaderless.embodied.stages.rollout:play_bodies",
    },
    reads=lambda recipe, _: ROLLOUTS[recipe.product].reads,
    writes=_rollout_writes,
    rows="expand",
    roles={"model": "generate"},
    streams=True,
    metrics=_rollout_metrics,
    check=_check_rollout,
    summary="sample responses to each prompt",
)
BUILTIN_STAGES: dict[str, StageSpec] = {
    "rollout": ROLLOUT,
    "play_on": replace(
        ROLLOUT,
        implementation="leaderless.stages.episode_rollout:play_on",
        implementations={},
        reads=("rows", *dict.fromkeys([*ROLLOUT_WRITES, *PLAY_COLUMNS])),
        reads_if_made=SUPPORT_COLUMNS,
        rows="extend",
        needs_whole_groups=True,
        streams=False,
        check=_check_play_on,
        summary="continue the episodes of other roles",
    ),
    "demonstrations": StageSpec(
        "leaderless.embodied.stages.demonstrations:demonstrations",
        reads=("rows",),
        writes=("prompt_tokens", "tokens", "response_mask", *SEEN_COLUMNS, "choices", "turns"),
        roles={"model": "score"},
        check=_check_demonstrations,
        summary="what demonstrations of a body show, as samples",
    ),
    "embeddings": StageSpec(
        "leaderless.embodied.stages.films:embeddings",
        reads=("frames",),
        writes=("embeddings",),
        check=lambda recipe, node: require_body(recipe, f"node '{node.name}' embeds what a body has seen"),
        summary="what each episode of a body looked like, as a vector",
    ),
    "reward": REWARD,
    "log_probs": StageSpec(
        "leaderless.stages.update:log_probs",
        reads=lambda recipe, node: [*SEQUENCE, *replayed(recipe, node)],
        reads_if_made=("temperatures", *SUPPORT_COLUMNS),
        writes=lambda _, node, workflow: [log_probs_column(node, workflow)],
        roles={"model": "score"},
        streams=True,
        check=check_log_probs,
        summary="log-probabilities of the sampled tokens under a role",
    ),
    "own_log_probs": StageSpec(
        "leaderless.stages.team:own_log_probs",
        reads=(*SEQUENCE, "agent", "response_lengths"),
        reads_if_made=lambda _, node: ("temperatures", *SUPPORT_COLUMNS, _own_log_probs_column(node)),
        writes=lambda _, node, __: [_own_log_probs_column(node)],
        roles={"model": "score"},
        takes_own_rows=True,
        streams=True,
        check=_check_own_log_probs,
        summary="log-probabilities of a role of a team on its own tokens",
    ),
    "rollout_with_greedy": replace(
        ROLLOUT,
        writes=lambda recipe, node, workflow: [*_rollout_writes(recipe, node, workflow), "is_greedy"],
        check=_check_greedy,
        summary="sample responses to each prompt, and decode one greedily",
    ),
    "advantage": StageSpec(
        "leaderless.stages.advantage:advantage",
        sampled_with=_advantage_sampled_with,
        reads=_advantage_reads,
        reads_if_made=_advantage_reads_if_made,
        writes=_advantage_writes,
        needs_whole_groups=True,
        metrics=_advantage_metrics,
        check=_check_advantage,
        summary="advantages from rewards",
    ),
    "remax": StageSpec(
        "leaderless.stages.advantage:remax",
        sampled_with=_advantage_sampled_with,
        reads=lambda recipe, node: [*dict.fromkeys([*_advantage_reads(recipe, node), "is_greedy"])],
        reads_if_made=_advantage_reads_if_made,
        writes=_advantage_writes,
        rows="filter",
        needs_whole_groups=True,
        metrics=_advantage_metrics,
        check=_check_advantage,
        summary="advantages over the greedy response, which is then dropped",
    ),
    "dynamic_sampling": StageSpec(
        "leaderless.stages.advantage:dynamic_sampling",
        reads=("rewards", "reward_valid"),
        reads_if_made=(EPISODE_IDS,),
        rows="filter",
        needs_whole_groups=True,
        metrics=tuple(
            f"sampling/{name}" for name in ("kept", "dropped_all_right", "dropped_all_wrong", "dropped_failed")
        ),
        check=_check_dynamic_sampling,
        summary="keep the groups whose rewards differ",
    ),
    "record": StageSpec(
        "leaderless.stages.recorded_samples:record",
        implementations={"bodies": "leaderless.embodied.stages.films:record"},
        sampled_with=("stop",),
        reads=_record_reads,
        reads_if_made=lambda recipe, _: ["advantages"] * (recipe.algorithm.sac is None),
        reads_if_written=("rollout_log_probs", "old_log_probs", EPISODE_IDS, "joint_ids"),
        has_effect=lambda recipe: recipe.run.recorded_prompts > 0,
        needs_whole_groups=True,
        summary="keep some samples for the report",
    ),
    "values": StageSpec(
        "leaderless.stages.update:values",
        reads=SEQUENCE,
        writes=lambda recipe, *_: ROLLOUTS[recipe.product].values,
        roles={"model": "score"},
        critics=("model",),
        streams=True,
        check=check_log_probs,
        summary="values of a critic before each sampled token",
    ),
    **TRAINING_STAGES,
    **DISTILLATION_STAGES,
    **PREFERENCE_STAGES,
}

JOIN, SELECT = "join rows", "select rows"
"""Stages of the nodes that the planner adds."""
ROW_STAGES: dict[str, StageSpec] = {
    JOIN: StageSpec("leaderless.stages.team:join", rows="join", summary="rows of several nodes together"),
    SELECT: StageSpec(
        "leaderless.stages.team:select",
        reads=lambda _, node: [column for column, _ in node.where],
        rows="filter",
        streams=True,
        summary="the rows that a node selects",
    ),
}
RESPOND, KEEP = "answer held-out prompts", "keep responses"
"""Stages of the nodes of an evaluation, whose responses no other node reads."""
EVALUATION_STAGES: dict[str, StageSpec] = {
    RESPOND: replace(ROLLOUT, has_effect=True, check=None),
    KEEP: StageSpec("leaderless.stages.team:join", has_effect=True, grades=True),
}


def spec_of(node: Node) -> StageSpec:
    """The contract of the stage that a node runs: a built-in stage, or a function declared with `@stage`."""
    if node.run in ROW_STAGES:
        return ROW_STAGES[node.run]
    found = EVALUATION_STAGES.get(node.run) or STAGES.find(node.run, f"nodes.{node.name}.run", BUILTIN_STAGES)
    return found.with_guests(node) if node.judges or node.teachers else found
