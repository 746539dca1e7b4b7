"""The contracts of the built-in stages that train, and the parts that scoring shares with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leaderless.config import RecipeError
from leaderless.planner.workflow.columns import (
    COLUMNS,
    EPISODE_IDS,
    EXPERTS,
    SEEN_COLUMNS,
    SUPPORT_COLUMNS,
    TAKEN_COLUMNS,
)
from leaderless.planner.workflow.stage_spec import AGES, StageSpec, may_be_stale

if TYPE_CHECKING:
    from leaderless.config import Recipe
    from leaderless.planner.workflow.workflow import Node

SEQUENCE = ("prompt_tokens", "tokens", "response_mask")
"""Columns that make up a training sequence."""
TURN_COLUMNS = ("agent", "joint_ids", "actor", "turns")
"""Columns for the role that sampled a token, the play and the turn."""
OWNERS_OF_LOG_PROBS = {
    "rollout": "the engine that sampled",
    "old": "the trained role before this step's updates",
    "ref": "the reference",
}
"""Owners of the log-probability columns that are not named after a role."""


def _old_log_probs(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    return ["old_log_probs"] if recipe.algorithm.proximal == "recomputed" else []


def _update_reads(recipe: Recipe, node: Node) -> list[str]:
    columns = [*SEQUENCE, "advantages", "reward_valid", "rollout_log_probs", "policy_versions"]
    columns += replayed(recipe, node)
    algorithm = recipe.algorithm
    if recipe.batch.updates_per_step > 1:
        columns += _old_log_probs(recipe, node)
    if algorithm.is_penalized_in_loss:
        columns.append("ref_log_probs")
    return list(dict.fromkeys([*columns, *algorithm.policy_loss.reads, *filter_reads(recipe)]))


def replayed(recipe: Recipe, node: Node) -> list[str]:
    """The column of experts, if a node has the role that sampled replay its choices."""
    return [EXPERTS] if recipe.algorithm.replay_experts and node.agents == (node.role,) else []


def refuse_replay(recipe: Recipe, node: Node) -> None:
    """Refuse to replay experts in a node with rows of several models."""
    if recipe.algorithm.replay_experts:
        raise RecipeError.at(
            "algorithm.replay_experts",
            f"needs rows that one role has sampled, but node '{node.name}' takes those of a team: leave it out",
        )


def refuse_tasks(recipe: Recipe, why: str, section: str = "") -> None:
    """Refuse a recipe whose tasks come from a section, by default from any."""
    if recipe.task_section and recipe.task_section == (section or recipe.task_section):
        raise RecipeError.at(recipe.task_section, why)


def require_body(recipe: Recipe, why: str) -> None:
    """Refuse a recipe without a body."""
    if recipe.body is None:
        raise RecipeError.at("body", f"must name an environment: {why}")


def filter_reads(recipe: Recipe) -> list[str]:
    """Columns that exclude samples from training."""
    return ["truncated"] if recipe.algorithm.overlong.filter else []


def _update_metrics(recipe: Recipe, node: Node) -> list[str]:
    own = recipe.algorithm.policy_loss.metrics
    return [*_common_update_metrics(recipe, node), *(f"{node.role}/{name}" for name in own)]


def _common_update_metrics(recipe: Recipe, node: Node) -> list[str]:
    algorithm = recipe.algorithm
    names = [*_sft_metrics(recipe, node), f"{node.role}/clip_fraction", "rollout/staleness"]
    names += [f"mismatch/{name}" for name in ("abs_mean", "abs_max", "kl", "effective_samples")]
    if may_be_stale(recipe, node):
        names += ["staleness/oldest"]
        names += [f"{name}/{age}" for name in ("staleness/share", "mismatch/kl_by_age") for age in AGES]
    if algorithm.is_penalized_in_loss:
        names += [f"{node.role}/kl", *adapted_metrics(recipe)]
    if algorithm.correction.has_weights:
        names += ["correction/weight", "correction/dropped"]
    return names


def adapted_metrics(recipe: Recipe) -> list[str]:
    """Metrics of an adaptive coefficient of the KL penalty."""
    return [] if recipe.algorithm.kl.target is None else ["policy/kl_coefficient"]


def _sft_metrics(recipe: Recipe, node: Node) -> list[str]:
    return [*training_metrics(recipe, node), f"{node.role}/entropy", "throughput/tokens_per_s"]


def training_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    """Metrics of every optimizer update."""
    own = (f"{node.role}/{name}" for name in ("loss", "grad_norm", "learning_rate", "updates_without_signal"))
    return [*own, f"guard/skipped/{node.role}", "guard/roll_backs"]


def check_sample_fits(recipe: Recipe, section: Literal["data", "rollout"]) -> None:
    """Check that a pass can take the longest sample."""
    if recipe.body is not None:
        steps = recipe.body.max_steps
        is_divided = all(model.gradient_checkpointing for model in recipe.models.values())
        if (bound := recipe.batch.first_micro_batch_tokens(steps)) < steps and not is_divided:
            raise RecipeError.at(
                "batch.micro_batch_tokens",
                f"is {bound}, but an episode may have {steps} steps (body.max_steps), which are not divided: raise it, "
                "or set gradient_checkpointing of all models",
            )
        return
    rest, response = recipe.length_setting, recipe.longest_response()
    if section == "data":
        rest, response = "data.max_response_tokens", recipe.data.max_response_tokens
    longest = recipe.data.max_prompt_tokens + response
    check_pass_fits(recipe, longest, f"but one sample may have {longest} tokens (data.max_prompt_tokens + {rest})")


def check_pass_fits(recipe: Recipe, longest: int, reason: str) -> None:
    """Check that a pass can take the longest indivisible sequence; `reason` names it in the error."""
    bound = recipe.batch.first_micro_batch_tokens(longest)
    num_parts = max((layout.cp for layout in recipe.layout.values()), default=1)
    if bound * num_parts < longest:
        raise RecipeError.at("batch.micro_batch_tokens", f"is {bound}, {reason}: raise it or shorten them")


def check_log_probs(recipe: Recipe, node: Node) -> None:
    """Check that samples fit into memory, and that the column of a role's log-probabilities has a unique name."""
    check_sample_fits(recipe, "rollout")
    if node.role in OWNERS_OF_LOG_PROBS:
        raise RecipeError.at(
            f"nodes.{node.name}.role",
            f"'{node.role}' cannot be the name of a role that is scored: {node.role}_log_probs holds those of "
            f"{OWNERS_OF_LOG_PROBS[node.role]}; give the role another name",
        )


def _check_update(recipe: Recipe, node: Node) -> None:
    check_sample_fits(recipe, "rollout")
    check_updates_per_step(recipe)
    if recipe.algorithm.team.rotate_steps and len(node.team) < 2:
        raise RecipeError.at(
            "algorithm.team.rotate_steps",
            f"is {recipe.algorithm.team.rotate_steps}, but no other role than '{node.role}' samples and is trained: "
            "leave it out",
        )
    _check_proximal(recipe, node)
    if recipe.algorithm.critic.warmup_steps >= recipe.steps:
        raise RecipeError.at(
            "algorithm.critic.warmup_steps",
            f"is {recipe.algorithm.critic.warmup_steps}, so that node '{node.name}' would train nothing in "
            f"{recipe.steps} steps: set it below `steps`",
        )
    _check_policy_loss(recipe, node)


def _check_proximal(recipe: Recipe, node: Node) -> None:
    if recipe.algorithm.proximal == "recomputed":
        return
    reason = None
    if node.run != "update":
        reason = (
            f"node '{node.name}' runs '{node.run}', which recomputes the log-probabilities before its update anyway"
        )
    elif recipe.batch.updates_per_step == 1 and not may_be_stale(recipe, node):
        reason = "before the only update of a step they are those of the policy itself, which are never recomputed"
    if reason:
        raise RecipeError.at("algorithm.proximal", f"is interpolated, but {reason}: leave it out")


def _check_policy_loss(recipe: Recipe, node: Node) -> None:
    loss = recipe.algorithm.policy_loss
    taken = {*_common_update_metrics(recipe, node)} & {f"{node.role}/{name}" for name in loss.metrics}
    if taken:
        raise RecipeError.at(
            "algorithm.policy_loss.type",
            f"is {loss.type}, whose metric '{min(taken)}' is reported by every update: give it another name",
        )
    for name in loss.reads:
        column = COLUMNS.get(name)
        if column and (column.kind == "object" or column.axis not in {None, "response_tokens"}):
            raise RecipeError.at(
                "algorithm.policy_loss.type",
                f"is {loss.type}, which reads '{name}': a loss can only read columns with one value for each sample or "
                "response token; compute one in a stage of the workflow, and read that",
            )
    loss.check(recipe)


def _check_update_in_turn(recipe: Recipe, node: Node) -> None:
    _check_update(recipe, node)
    refuse_replay(recipe, node)
    if node.role not in node.agents:
        raise RecipeError.at(
            f"nodes.{node.name}.role",
            f"'{node.role}' has sampled none of the rows before node '{node.name}', and has nothing to be trained "
            "on: name a role that samples",
        )


def _check_update_critic(recipe: Recipe, node: Node) -> None:
    check_log_probs(recipe, node)
    check_updates_per_step(recipe)


def _check_sac(recipe: Recipe, node: Node) -> None:
    """Check the parts of transitions, and refuse settings that SAC would ignore."""
    require_body(recipe, f"node '{node.name}' works with transitions of a body")
    if recipe.algorithm.sac is None:
        raise RecipeError.at("algorithm.sac", f"must be given, as `sac: {{}}`: node '{node.name}' learns by it")
    role = node.role or "policy"
    model = recipe.model_of(role)
    for key, is_given in {
        "schedule.replan_every_steps": bool(recipe.schedule.replan_every_steps),
        "optimizer.schedule": recipe.optimizer.schedule != "constant",
        "batch.updates_per_step": recipe.batch.updates_per_step > 1,
        "algorithm.kl.coefficient": recipe.algorithm.uses_reference,
        f"models.{role}.gradient_checkpointing": model is not None and model.gradient_checkpointing,
    }.items():
        if is_given:
            raise RecipeError.at(key, f"cannot be combined with node '{node.name}', which learns by SAC: leave it out")


def check_updates_per_step(recipe: Recipe) -> None:
    """Check that each update of a step has a prompt."""
    if recipe.algorithm.sac is not None:
        raise RecipeError.at(
            "algorithm.sac", "does nothing in nodes that train in another way: use the workflow sac, or leave it out"
        )
    batch = recipe.batch
    if batch.parts_per_step > batch.prompts_per_step:
        times = f" in {batch.epochs_per_step} epochs" * (batch.epochs_per_step > 1)
        raise RecipeError.at(
            "batch.updates_per_step",
            f"is {batch.updates_per_step}{times}, more than the {batch.prompts_per_step} prompts of a step; each "
            "update needs at least one prompt",
        )


def _check_sft(recipe: Recipe, node: Node) -> None:
    refuse_tasks(
        recipe,
        f"brings requests, which have no responses that node '{node.name}' could imitate: leave it out",
        "online",
    )
    if recipe.body is None and not recipe.data.has_responses:
        raise RecipeError.at(
            f"{next(iter(recipe.data.train_sets()))}.response", f"must name the column that node '{node.name}' imitates"
        )
    check_sample_fits(recipe, "data")
    check_updates_per_step(recipe)


TRAINING_STAGES: dict[str, StageSpec] = {
    "update": StageSpec(
        "leaderless.stages.update:update",
        reads=_update_reads,
        reads_if_made=(EPISODE_IDS, "temperatures", *SUPPORT_COLUMNS),
        reads_if_carried=_old_log_probs,
        roles={"model": "train"},
        idle_steps=lambda recipe: recipe.algorithm.critic.warmup_steps,
        has_effect=True,
        metrics=_update_metrics,
        check=_check_update,
        summary="policy-gradient updates",
    ),
    "update_in_turn": StageSpec(
        "leaderless.stages.team:update_in_turn",
        # It computes the log-probabilities before its update itself, to compare them with those after it.
        reads=lambda recipe, node: [
            *dict.fromkeys(name for name in (*_update_reads(recipe, node), *TURN_COLUMNS) if name != "old_log_probs")
        ],
        reads_if_made=(EPISODE_IDS, "temperatures", *SUPPORT_COLUMNS),
        writes=("advantages",),
        needs_whole_groups=True,
        roles={"model": "train"},
        takes_own_rows=True,
        idle_steps=lambda recipe: recipe.algorithm.critic.warmup_steps,
        has_effect=True,
        metrics=lambda recipe, node: [*_update_metrics(recipe, node), f"{node.role}/joint_ratio"],
        check=_check_update_in_turn,
        summary="policy-gradient updates of one role of a team after the other",
    ),
    "update_critic": StageSpec(
        "leaderless.stages.update:update_critic",
        reads=lambda recipe, _: [*SEQUENCE, "values", "returns", "reward_valid", *filter_reads(recipe)],
        reads_if_made=(EPISODE_IDS,),
        roles={"model": "train"},
        critics=("model",),
        has_effect=True,
        metrics=lambda recipe, node: [
            *training_metrics(recipe, node),
            *(f"{node.role}/{name}" for name in ("clip_fraction", "value_mean", "explained_variance")),
        ],
        check=_check_update_critic,
        summary="clipped squared-error updates towards the returns",
    ),
    "remember": StageSpec(
        "leaderless.embodied.stages.sac:remember",
        reads=(*SEEN_COLUMNS, *TAKEN_COLUMNS, "truncated"),
        roles={"model": "score"},
        has_effect=True,
        metrics=("sac/transitions", "sac/demonstrations"),
        check=_check_sac,
        summary="keep what a body has lived through",
    ),
    "update_sac": StageSpec(
        "leaderless.embodied.stages.sac:update_sac",
        roles={"model": "train"},
        has_effect=True,
        metrics=tuple(f"sac/{name}" for name in ("critic_loss", "actor_loss", "entropy", "temperature", "updates")),
        check=_check_sac,
        summary="soft actor-critic updates on what was kept",
    ),
    "sft": StageSpec(
        "leaderless.stages.update:sft",
        reads=SEQUENCE,
        roles={"model": "train"},
        has_effect=True,
        metrics=_sft_metrics,
        check=_check_sft,
        summary="next-token updates on given responses",
    ),
}
