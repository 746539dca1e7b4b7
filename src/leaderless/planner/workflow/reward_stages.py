"""The contracts of the built-in stages that compute rewards, and that learn from preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.config import RecipeError
from leaderless.config.data import TrainingSetConfig
from leaderless.planner.workflow.columns import EPISODE_IDS
from leaderless.planner.workflow.stage_spec import StageSpec
from leaderless.planner.workflow.training_stages import (
    SEQUENCE,
    check_log_probs,
    check_pass_fits,
    check_updates_per_step,
    refuse_tasks,
    training_metrics,
)

if TYPE_CHECKING:
    from leaderless.algorithms.preference_loss import Preferences
    from leaderless.config import Recipe
    from leaderless.config.data import DatasetConfig
    from leaderless.config.judges import JudgeOptions
    from leaderless.config.rewards import RewardsConfig
    from leaderless.planner.workflow.workflow import Node


ENVIRONMENT = "environment"
"""Name of the environment's reward among the rewards of a sample."""
SUCCESS = "success"
"""Name of what says whether a body has done its task, among them."""
JUDGE_METRICS = ("failed_share", "cached_share", "requests", "latency_s", "contradictions")
"""Metrics of judges, below `judge/`; the last one only if some compare responses."""


def judge_metrics(config: RewardsConfig) -> tuple[str, ...]:
    """Metrics of the judges of a recipe, below `judge/`."""
    return JUDGE_METRICS[: None if compares(config) else -1] if config.judges() else ()


def compares(config: RewardsConfig) -> bool:
    """Whether a judge compares the responses of a group with each other."""
    return any(options.pairwise for options in config.judges().values())


def _reward_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    names = [f"reward/{name}" for name in ("mean", "std", "failed", *recipe.reward_names)]
    names += [f"judge/{name}" for name in judge_metrics(recipe.reward)]
    is_graded = bool(recipe.has_episodes and recipe.reward.options())
    return [*names, *["episode/grading_s", "failure/grader"] * is_graded]


def _check_reward(recipe: Recipe, node: Node) -> None:
    if not recipe.reward_names:
        raise RecipeError.at("reward", f"must name at least one reward, as node '{node.name}' computes it")
    for name, options in recipe.reward.judges().items():
        _check_judge(recipe, f"reward.{name}", options)
    limited = next((name for name, options in recipe.reward.options().items() if options.sources), None)
    train = recipe.data.train
    if limited is not None and isinstance(train, TrainingSetConfig) and train.source is None:
        raise RecipeError.at(
            f"reward.{limited}",
            "applies to some sources only, which needs data.train.source: the column that names the source of a row",
        )


def _check_judge(recipe: Recipe, key: str, options: JudgeOptions) -> None:
    """Refuse a judge that is shown what there is not, or that compares what is alone."""
    siblings = {"batch.responses_per_prompt": recipe.batch.responses_per_prompt}
    if recipe.evaluation.every_steps:
        siblings["evaluation.responses_per_prompt"] = recipe.evaluation.responses_per_prompt
    for setting, number in siblings.items():
        if options.pairwise and number < 2:
            raise RecipeError.at(setting, f"must be at least 2: {key}.pairwise compares the responses to a prompt")
    if not options.sources:  # it grades rows of all datasets
        for name, config in recipe.data.train_sets().items():
            _check_shown(key, options, name, config)


def _check_shown(key: str, options: JudgeOptions, name: str, config: DatasetConfig) -> None:
    if "answer" in options.places and config.answer is None:
        raise RecipeError.at(f"{key}.prompt", f"shows {{answer}}, but {name}.answer names no column: name it")
    kept = config.wanted_columns()
    missing = sorted(options.columns - kept) if kept is not None else []
    if missing:
        raise RecipeError.at(
            f"{key}.prompt", f"shows {{{missing[0]}}}, but {name}.columns keeps no such column: add it there"
        )


REWARD = StageSpec(
    "leaderless.stages.reward:reward",
    sampled_with=("stop",),
    reads=lambda recipe, _: ["rows", "tokens", "truncated", *({"is_greedy"} & {*recipe.algorithm.advantage.reads})],
    reads_if_made=(
        "response_mask",
        EPISODE_IDS,
        "joint_ids",
        "actor",
        "environment_rewards",
        "environment_failed",
        "success",
    ),
    writes=("rewards", "reward_valid", "reward_details"),
    compares_groups=lambda recipe: compares(recipe.reward),
    needs_whole_episodes=True,
    streams=True,
    grades=True,
    metrics=_reward_metrics,
    check=_check_reward,
    summary="compute the reward of each response",
)


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


def _check_model_reward(recipe: Recipe, node: Node) -> None:
    refuse_tasks(recipe, f"brings episodes, but node '{node.name}' scores single responses to prompts: leave it out")
    check_log_probs(recipe, node)


PREFERENCE_STAGES: dict[str, StageSpec] = {
    "update_reward_model": StageSpec(
        "leaderless.stages.preferences:update_reward_model",
        reads=(*_PAIR_COLUMNS, "margins"),
        roles={"model": "train"},
        critics=("model",),
        has_effect=True,
        metrics=lambda recipe, node: [
            *training_metrics(recipe, node),
            *(f"{node.role}/{name}" for name in PREFERENCE_METRICS),
            "throughput/tokens_per_s",
        ],
        check=lambda recipe, node: check_preferences(recipe, node, "pairs", "the reward model"),
        summary="updates of a reward model on which of two responses is preferred",
    ),
    "model_reward": StageSpec(
        "leaderless.stages.preferences:model_reward",
        reads=SEQUENCE,
        reads_if_made=("rewards", "reward_valid", "reward_details"),
        writes=("rewards", "reward_valid", "reward_details"),
        roles={"model": "score"},
        critics=("model",),
        streams=True,
        metrics=lambda _, node: [f"reward/{name}" for name in ("mean", "std", "failed", node.role)],
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
