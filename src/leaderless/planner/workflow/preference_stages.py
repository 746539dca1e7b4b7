"""The contracts of the built-in stages that learn from preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from leaderless.config import RecipeError
from leaderless.planner.workflow.stage_spec import StageSpec
from leaderless.planner.workflow.training_stages import (
    SEQUENCE,
    check_log_probs,
    check_pass_fits,
    check_updates_per_step,
    training_metrics,
)

if TYPE_CHECKING:
    from leaderless.algorithms.preference_loss import Preferences
    from leaderless.config import Recipe
    from leaderless.config.recipe import Product
    from leaderless.planner.workflow.workflow import Node

REFERENCE_SCORES = "reference_scores"
"""Column of the log-probabilities of both responses under the reference."""
PREFERENCE_METRICS = ("accuracy", "margin", "reward_chosen", "reward_rejected")
"""Metrics of both sides, below the role."""
_PAIR_COLUMNS = ("prompt_tokens", "first_tokens", "second_tokens")


def _reads(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    loss = recipe.algorithm.preference_loss
    columns = [*_PAIR_COLUMNS] + ["desirable"] * (loss.data == "singles")
    return columns + [REFERENCE_SCORES] * loss.uses_reference


def _metrics(recipe: Recipe, node: Node) -> list[str]:
    loss = recipe.algorithm.preference_loss
    own = [name for name in PREFERENCE_METRICS if name != "accuracy" or loss.data == "pairs"]
    own += ["entropy", "log_prob_chosen", "log_prob_rejected", *loss.metrics]
    own += ["sft_loss"] * (loss.sft_coefficient > 0)
    return [*training_metrics(recipe, node), *(f"{node.role}/{name}" for name in own), "throughput/tokens_per_s"]


SECTIONS: Mapping[Product, str] = {"text": "", "episodes": "environment", "online": "online", "bodies": "body"}
"""The section of a recipe from which the tasks of a product come; none for prompts of a dataset."""


def refuse_tasks(recipe: Recipe, why: str) -> None:
    """Refuse a recipe whose rows are tasks, without prompts."""
    if section := SECTIONS[recipe.product]:
        raise RecipeError.at(section, why)


def check_preferences(recipe: Recipe, node: Node, wanted: Preferences, reader: str) -> None:
    """Check that the data have the preferences that a node reads, and that they fit into a pass."""
    key, train = next(iter(recipe.data.train_sets().items()))
    refuse_tasks(recipe, f"has no responses that node '{node.name}' could compare: leave it out")
    if train.preferences != wanted:
        names = "chosen and rejected, the columns of both responses" if wanted == "pairs" else "response and desirable"
        raise RecipeError.at(
            f"{key}.{'chosen' if wanted == 'pairs' else 'desirable'}",
            f"{reader} of node '{node.name}' learns from {wanted}: name {names}",
        )
    longest = longest_pair(recipe)
    sum_of = "(data.max_prompt_tokens + 2 data.max_response_tokens), which are not divided"
    check_pass_fits(recipe, longest, f"but a prompt with both of its responses may have {longest} tokens {sum_of}")
    check_updates_per_step(recipe)


def scored_before(recipe: Recipe, node: Node) -> str | None:
    """The role whose model scores the dataset before the first step for a node: the reference of the trained role."""
    if node.run != "update_preferences" or node.role is None:
        return None
    if not recipe.as_seen_by(node.role).algorithm.preference_loss.uses_reference:
        return None
    return "reference" if node.role == "policy" else f"{node.role}_reference"


def longest_pair(recipe: Recipe) -> int:
    """Tokens of the longest prompt with two responses, which a pass takes together."""
    return recipe.data.max_prompt_tokens + 2 * recipe.data.max_response_tokens


def _check_update(recipe: Recipe, node: Node) -> None:
    loss = recipe.algorithm.preference_loss
    check_preferences(recipe, node, loss.data, f"the loss '{loss.type}'")
    for key, train in recipe.data.train_sets().items():
        if loss.uses_reference and train.streaming:
            raise RecipeError.at(
                f"{key}.streaming",
                f"cannot be combined with the loss '{loss.type}': the reference scores all rows before the first step, "
                "and a stream has no end; leave it out, or use a loss without a reference, such as simpo",
            )
    loss.check(recipe)


def _reward_model_metrics(recipe: Recipe, node: Node) -> list[str]:
    own = (f"{node.role}/{name}" for name in PREFERENCE_METRICS)
    return [*training_metrics(recipe, node), *own, "throughput/tokens_per_s"]


def _check_reward_model(recipe: Recipe, node: Node) -> None:
    check_preferences(recipe, node, "pairs", "the reward model")


def _check_model_reward(recipe: Recipe, node: Node) -> None:
    refuse_tasks(recipe, f"brings episodes, but node '{node.name}' scores single responses to prompts: leave it out")
    check_log_probs(recipe, node)


def _model_reward_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    return [f"reward/{name}" for name in ("mean", "std", "failed", node.role)]


PREFERENCE_STAGES: dict[str, StageSpec] = {
    "update_reward_model": StageSpec(
        "leaderless.stages.reward_model:update_reward_model",
        reads=(*_PAIR_COLUMNS, "margins"),
        roles={"model": "train"},
        critics=("model",),
        has_effect=True,
        metrics=_reward_model_metrics,
        check=_check_reward_model,
        summary="updates of a reward model on which of two responses is preferred",
    ),
    "model_reward": StageSpec(
        "leaderless.stages.reward_model:model_reward",
        reads=SEQUENCE,
        reads_if_made=("rewards", "reward_valid", "reward_details"),
        writes=("rewards", "reward_valid", "reward_details"),
        roles={"model": "score"},
        critics=("model",),
        streams=True,
        metrics=_model_reward_metrics,
        check=_check_model_reward,
        summary="reward responses by the score of a reward model",
    ),
    "update_preferences": StageSpec(
        "leaderless.stages.preferences:update_preferences",
        reads=_reads,
        roles={"model": "train"},
        has_effect=True,
        metrics=_metrics,
        check=_check_update,
        summary="updates on which of two responses is preferred",
    ),
}
