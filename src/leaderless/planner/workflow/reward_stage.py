"""The contract of the stage that computes rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.config import RecipeError
from leaderless.config.data import TrainingSetConfig
from leaderless.planner.workflow.columns import EPISODE_IDS
from leaderless.planner.workflow.stage_spec import StageSpec

if TYPE_CHECKING:
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


def reward_names(recipe: Recipe) -> list[str]:
    """Names of the rewards of a sample: the rewards of the recipe, and what comes with episodes."""
    return [*recipe.reward.options(), *([ENVIRONMENT] if recipe.has_tasks else [])]


def judge_metrics(config: RewardsConfig) -> tuple[str, ...]:
    """Metrics of the judges of a recipe, below `judge/`."""
    return JUDGE_METRICS[: None if compares(config) else -1] if config.judges() else ()


def compares(config: RewardsConfig) -> bool:
    """Whether a judge compares the responses of a group with each other."""
    return any(options.pairwise for options in config.judges().values())


def _reward_reads(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    return ["rows", "tokens", "truncated", *({"is_greedy"} & {*recipe.algorithm.advantage.reads})]


def _reward_metrics(recipe: Recipe, node: Node) -> list[str]:  # noqa: ARG001
    names = [f"reward/{name}" for name in ("mean", "std", "failed", *reward_names(recipe))]
    names += [f"judge/{name}" for name in judge_metrics(recipe.reward)]
    return [*names, *["episode/grading_s"] * bool(recipe.has_episodes and recipe.reward.options())]


def _check_reward(recipe: Recipe, node: Node) -> None:
    if not reward_names(recipe):
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
    reads=_reward_reads,
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
