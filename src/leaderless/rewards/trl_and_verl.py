"""Rewards as users of TRL and verl write them, unchanged. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from leaderless.base.errors import RecipeError
from leaderless.rewards.protocol import AnyReward, RewardInput, RewardResult, batch_reward

AnyFunction = Callable[..., object]
_TRL_MARK = "completions"
_VERL_MARKS = {"solution_str", "ground_truth"}
_NOT_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Arguments that TRL also passes, but a process that grades texts does not have."""
_ANY = (inspect.Parameter.VAR_KEYWORD,)


def adapt(function: AnyFunction, key: str) -> AnyReward | None:
    """The reward for a function of TRL or verl; None if it is neither.

    Raises:
        RecipeError: It is one, but takes an argument that is not available.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in another language
        return None
    names = {name for name, parameter in parameters.items() if parameter.kind not in _ANY}
    needed = {name for name in names if parameters[name].default is inspect.Parameter.empty}
    takes_all = any(parameter.kind in _ANY for parameter in parameters.values())
    if _TRL_MARK in names:
        if absent := sorted(needed & set(_NOT_GIVEN)):
            raise RecipeError.at(
                key,
                f"takes {absent[0]}, which rewards do not get here: give it a default, and take `completions` alone",
            )
        return TrlReward(function, None if takes_all else frozenset(names))
    return VerlReward(function, None if takes_all else frozenset(names)) if names >= _VERL_MARKS else None


@batch_reward
class TrlReward:
    """A function of lists, `completions, **columns -> list[float]`, which is called with all responses at once.

    As in TRL, a conversation's completion is a list with one message of the assistant, every column of the rows is a
    list, and None counts as nothing in the sum of rewards.
    """

    def __init__(self, function: AnyFunction, names: frozenset[str] | None) -> None:
        """Call a function with its arguments of these names, or with all of them if None."""
        self._function, self._names = function, names

    def __call__(self, samples: Sequence[RewardInput], /) -> list[float]:
        """Grade responses."""
        names = dict.fromkeys(name for sample in samples for name in sample.row if name not in {"prompt", "completion"})
        columns = {name: [sample.row.get(name) for sample in samples] for name in names}
        completions = [*map(_completion, samples)]
        given = {"prompts": [sample.prompt for sample in samples], "completions": completions, **columns}
        values = self._function(**_taken(given, self._names))
        if not isinstance(values, Sequence) or len(values) != len(samples):
            raise TypeError(
                f"returned {str(values)[:100]} for {len(samples)} completions, but must return a list with a number "
                "for each"
            )
        return [0.0 if value is None else value for value in values]


def _completion(sample: RewardInput) -> object:
    is_chat = isinstance(sample.prompt, Sequence) and not isinstance(sample.prompt, str)
    return [{"role": "assistant", "content": sample.response}] if is_chat else sample.response


class VerlReward:
    """A function `data_source, solution_str, ground_truth, extra_info -> float | dict` of rows as verl prepares them.

    The expected answer is `reward_model.ground_truth` of the row, or the recipe's answer column if there is none. Of a
    dictionary, `score` is the reward, and `pred` the answer.
    """

    def __init__(self, function: AnyFunction, names: frozenset[str] | None) -> None:
        """Call a function with its arguments of these names, or with all of them if None."""
        self._function, self._names = function, names

    def __call__(self, sample: RewardInput, /) -> float | RewardResult:
        """Grade a response."""
        model = sample.row.get("reward_model")
        expected = model.get("ground_truth") if isinstance(model, Mapping) else None
        given: Mapping[str, object] = {
            "data_source": sample.row.get("data_source"),
            "solution_str": sample.response,
            "ground_truth": sample.answer if expected is None else expected,
            "extra_info": sample.row.get("extra_info"),
        }
        value = self._function(**_taken(given, self._names))
        if not isinstance(value, Mapping):
            return value  # type: ignore[return-value]  # whatever it is, it is checked as other rewards are
        if "score" not in value:
            raise TypeError(f"returned a dictionary without 'score': {sorted(map(str, value))}")
        answer = value.get("pred")
        return RewardResult(value["score"], None if answer is None else str(answer))


def _taken(given: Mapping[str, object], names: frozenset[str] | None) -> dict[str, object]:
    return {name: value for name, value in given.items() if names is None or name in names}


def math_of_verl(solution_str: str, ground_truth: object) -> RewardResult:
    """The reward `math` for rows as verl prepares them."""
    from leaderless.rewards.math_reward import MathReward

    sample = RewardInput("", solution_str, str(ground_truth), {}, is_truncated=False)
    return MathReward()(sample)
