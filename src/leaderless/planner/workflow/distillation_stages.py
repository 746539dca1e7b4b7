"""The contracts of the built-in stages of distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.config import RecipeError
from leaderless.planner.workflow.columns import EPISODE_IDS, TEACHER_COLUMNS
from leaderless.planner.workflow.stage_spec import AGES, StageSpec, may_be_stale
from leaderless.planner.workflow.training_stages import (
    SEQUENCE,
    check_sample_fits,
    check_updates_per_step,
    filter_reads,
    training_metrics,
)

if TYPE_CHECKING:
    from leaderless.config import Recipe
    from leaderless.planner.workflow.workflow import Node, Workflow


def _given(recipe: Recipe) -> list[str]:
    """Columns of the teacher's words, unless it is there itself."""
    return [] if recipe.algorithm.distillation.top_k is None else [*TEACHER_COLUMNS]


def teacher_name(role: str) -> str:
    """The name under which a stage has the teacher of a role."""
    return f"teacher_{role}"


def _teach_reads(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    config = recipe.algorithm.distillation
    return [*SEQUENCE, *["rows"] * (bool(config.teachers) or config.reads_rows)]


def _teach_writes(recipe: Recipe, node: Node, workflow: Workflow) -> list[str]:  # noqa: ARG001
    return _given(recipe)


def _teach_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    config = recipe.algorithm.distillation
    return [*["teacher/left_out"] * config.reads_rows, *["teacher/aligned"] * (config.align == "text")]


def _check_teach(recipe: Recipe, node: Node) -> None:  # noqa: ARG001
    check_sample_fits(recipe, "rollout")


def _check_distill(recipe: Recipe, node: Node) -> None:
    check_sample_fits(recipe, "rollout")
    check_updates_per_step(recipe)
    algorithm = recipe.algorithm
    for key, is_given in {
        "algorithm.kl.coefficient": algorithm.uses_reference,
        "algorithm.entropy_coefficient": algorithm.entropy_coefficient > 0,
        "algorithm.correction.type": algorithm.correction.has_weights,
        "algorithm.proximal": algorithm.proximal != "recomputed",
        "algorithm.replay_experts": algorithm.replay_experts,
        "algorithm.overlong.buffer_tokens": algorithm.overlong.buffer_tokens > 0,
        "algorithm.team.rotate_steps": algorithm.team.rotate_steps > 0,
        "algorithm.critic.warmup_steps": algorithm.critic.warmup_steps > 0,
    }.items():
        if is_given:
            raise RecipeError.at(
                key, f"does nothing for node '{node.name}', whose loss is the divergence from a teacher: leave it out"
            )


def _distill_metrics(recipe: Recipe, node: Node) -> list[str]:
    own = [f"{node.role}/{name}" for name in ("entropy", "divergence")]
    names = [*training_metrics(recipe, node), *own, "throughput/tokens_per_s", "rollout/staleness"]
    if may_be_stale(recipe, node):
        names += ["staleness/oldest", *(f"staleness/share/{age}" for age in AGES)]
    return names


DISTILLATION_STAGES: dict[str, StageSpec] = {
    "teach": StageSpec(
        "leaderless.stages.distillation:teach",
        reads=_teach_reads,
        writes=_teach_writes,
        metrics=_teach_metrics,
        asks_teachers=lambda recipe: recipe.algorithm.distillation.top_k is not None,
        streams=True,
        check=_check_teach,
        summary="likeliest words of a teacher at each sampled token",
    ),
    "distill": StageSpec(
        "leaderless.stages.distillation:distill",
        reads=lambda recipe, _: [*SEQUENCE, "reward_valid", "policy_versions", *filter_reads(recipe), *_given(recipe)],
        reads_if_made=(EPISODE_IDS, "temperatures"),
        roles={"model": "train"},
        asks_teachers=lambda recipe: recipe.algorithm.distillation.top_k is None,
        has_effect=True,
        metrics=_distill_metrics,
        check=_check_distill,
        summary="updates on the divergence of a student from a teacher",
    ),
}
