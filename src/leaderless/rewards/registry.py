"""Makes functions of the recipe's rewards. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import cast

from leaderless.base.errors import Problem, RecipeError
from leaderless.base.named_functions import load_callable, load_function
from leaderless.config.judges import JudgeOptions, RewardOptions
from leaderless.config.rewards import (
    AnswerMatchOptions,
    CodeOptions,
    ExactMatchOptions,
    FormatOptions,
    MathOptions,
    RewardsConfig,
    SearchFormatOptions,
)
from leaderless.rewards.protocol import AnyReward
from leaderless.rewards.text_rewards import AnswerMatchReward, ExactMatchReward, FormatReward, SearchFormatReward
from leaderless.rewards.trl_and_verl import adapt


def make_rewards(config: RewardsConfig, *, in_worker: bool = False) -> dict[str, AnyReward]:
    """Load the rewards of a recipe by name, importing the modules of custom ones.

    Args:
        config: The recipe's `reward` section.
        in_worker: Whether they are called in the process that runs the main script, which may define them.

    Raises:
        RecipeError: A custom function cannot be imported or does not take one argument.
    """
    return {name: _load(name, options, in_worker) for name, options in config.options().items()}


def check_rewards(config: RewardsConfig, *, in_worker: bool = False) -> None:
    """Refuse rewards that cannot be computed, before any process starts; see `make_rewards`.

    Raises:
        RecipeError: Custom functions cannot be imported, do not take one argument, or could not be called from
            a reward process; or programs cannot be run safely on this machine. All problems are named.
    """
    problems: list[Problem] = []
    for name, options in config.options().items():
        if isinstance(options, CodeOptions):
            from leaderless.rewards.sandbox.sandboxes import choose_sandbox

            try:
                choose_sandbox(options.sandbox, allow_weaker=options.allow_weaker)
            except RuntimeError as error:
                problems.append(Problem(f"reward.{name}", str(error)))
        if isinstance(options, JudgeOptions):
            problems += _problems_of(name, options)
        if ":" in name:
            try:
                _load_function(name, in_worker)
            except RecipeError as error:
                problems += error.problems
    if problems:
        raise RecipeError(problems)


def _problems_of(name: str, options: JudgeOptions) -> Sequence[Problem]:
    """The reasons why a judge cannot be asked."""
    from leaderless.rewards.judges.client import AnswerCache
    from leaderless.rewards.judges.judge import make_judges

    try:
        make_judges({name: options}, AnswerCache(None, 0))
    except RecipeError as error:
        return error.problems
    except ValueError as error:
        setting, _, message = str(error).partition(": ")
        return [Problem(f"reward.{name}.{setting}", message)]
    return []


def _load(name: str, options: RewardOptions, in_worker: bool) -> AnyReward:
    if isinstance(options, MathOptions):
        # Its library is slow to import, which only recipes that use it should pay for.
        from leaderless.rewards.math_reward import MathReward

        return MathReward()
    if isinstance(options, ExactMatchOptions):
        return ExactMatchReward(options)
    if isinstance(options, FormatOptions):
        return FormatReward(options)
    if isinstance(options, AnswerMatchOptions):
        return AnswerMatchReward()
    if isinstance(options, SearchFormatOptions):
        return SearchFormatReward(options)
    if isinstance(options, CodeOptions):
        from leaderless.rewards.code_reward import CodeReward

        return CodeReward(options)
    if isinstance(options, JudgeOptions):
        # Reward processes, which are small, do not ask judges.
        from leaderless.rewards.judges.client import AnswerCache
        from leaderless.rewards.judges.judge import make_judges

        return make_judges({name: options}, AnswerCache(None, options.kept_answers))[name]
    return _load_function(name, in_worker)


def _load_function(name: str, in_worker: bool) -> AnyReward:
    key = f"reward.{name}"
    if name.startswith("__main__:") and not in_worker:
        raise RecipeError.at(
            key,
            "must be in a module that can be imported: reward processes do not run the script; "
            "or set run.reward_processes=0",
        )
    found = load_callable(name, key, "function")
    adapted = adapt(found, key)
    function = found if adapted is not None else load_function(name, key=key, num_arguments=1)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise RecipeError.at(key, "must be a plain function that returns the reward, not a coroutine or generator")
    return adapted or cast(AnyReward, function)
