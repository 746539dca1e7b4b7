"""Advantages of a group once more, in plain Python and double precision, from their formulas alone.

They share no code with `leaderless.algorithms`, so that a mistake there is found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from leaderless.algorithms.advantage import Advantage
from leaderless.config import Recipe

TOLERANCE = 1e-5
"""Largest difference of advantages, relative to those above 1: the run computes the last step in float32."""


class GroupMember(NamedTuple):
    """A response among those to the same prompt, whose reward has not failed.

    Attributes:
        reward: Its reward.
        length: Number of its sampled tokens.
    """

    reward: float
    length: int


Settings = Mapping[str, Any]
"""Settings of an advantage, by name."""
Formula = Callable[[Sequence[GroupMember], Settings], list[float]]
"""Function from a group of at least two rewards that are not all the same to its advantages."""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _grpo(group: Sequence[GroupMember], settings: Settings) -> list[float]:
    """(r - mean) / (std + epsilon) with the sample's deviation, or r - mean. DeepSeekMath, arXiv 2402.03300, 4.1.2."""
    rewards = [one.reward for one in group]
    mean = _mean(rewards)
    if not settings["normalize_by_std"]:
        return [reward - mean for reward in rewards]
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + settings["epsilon"]) for reward in rewards]


def _rloo(group: Sequence[GroupMember], settings: Settings) -> list[float]:  # noqa: ARG001
    """Each reward minus the mean of the others. RLOO, arXiv 2402.14740."""
    rewards = [one.reward for one in group]
    return [own - _mean([*rewards[:place], *rewards[place + 1 :]]) for place, own in enumerate(rewards)]


def _opo(group: Sequence[GroupMember], settings: Settings) -> list[float]:  # noqa: ARG001
    """Each reward minus the mean in which long responses weigh more. OPO, arXiv 2505.23585."""
    tokens = sum(one.length for one in group)
    baseline = math.fsum(one.length * one.reward for one in group) / max(1, tokens)
    return [one.reward - baseline for one in group]


def _maxrl(group: Sequence[GroupMember], settings: Settings) -> list[float]:
    """(c - p) / p, with p the share of correct responses. MaxRL, arXiv 2602.02710."""
    correct = [float(one.reward >= settings["correct_at"]) for one in group]
    share = _mean(correct)
    return [(one - share) / share if 0 < share < 1 else 0.0 for one in correct]


FORMULAS: Mapping[str, Formula] = {"grpo": _grpo, "rloo": _rloo, "opo": _opo, "maxrl": _maxrl}
"""Formulas by the type of the advantage."""


def why_not(recipe: Recipe) -> str:
    """Why the advantages of a recipe are not computed again; empty if they are."""
    algorithm = recipe.algorithm
    if algorithm.advantage.type not in FORMULAS:
        return f"advantages of type {algorithm.advantage.type} are not recomputed ({', '.join(FORMULAS)} are)"
    if algorithm.overlong.buffer_tokens or algorithm.is_penalized_in_reward:
        return "advantages of rewards with penalties for length or divergence are not recomputed"
    return ""


def group_advantages(group: Sequence[GroupMember], settings: Advantage) -> list[float]:
    """The advantages of a group; 0 where fewer than two rewards are known, or all are the same."""
    if len({one.reward for one in group}) < 2:
        return [0.0] * len(group)
    return FORMULAS[settings.type](group, settings.model_dump())
