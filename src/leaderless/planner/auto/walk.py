"""The seconds of a step of a plan, from measured seconds of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from leaderless.planner.auto.profile import Profile
from leaderless.planner.auto.seconds import Seconds, StepSeconds, has_own_rows
from leaderless.planner.entries import Action, Load, Pull, Push, Reshard, RunNode, SyncWeights, flat
from leaderless.planner.plan import Loop, Plan


@dataclass(frozen=True)
class Predicted:
    """A step of a plan.

    Attributes:
        seconds: Duration, on average.
        error: Relative error to be expected: that of the laws of its nodes, weighted by their seconds.
        nodes: Seconds of each node's slowest rank.
    """

    seconds: float
    error: float
    nodes: dict[str, float]


def predict(plan: Plan, profile: Profile, steps: StepSeconds) -> Predicted:
    """Walk through the plan's schedule with the clocks of its ranks; several loops go on next to each other."""
    nodes = {node.name: steps.of(node, node.layout.dp, is_balanced=not has_own_rows(node, plan)) for node in plan.nodes}
    took = {loop.name: _loop_seconds(plan, loop, profile, nodes, steps.num_draws) for loop in plan.loops}
    means = {name: float(seconds.mean()) for name, seconds in nodes.items()}
    laws = {name: profile.stages[name].error for name in means if name in profile.stages}
    total = sum(means[name] for name in laws) or 1.0
    error = sum(means[name] * laws[name] for name in laws) / total
    seconds = _pace([took[loop.name] for loop in plan.loops], [loop.lag for loop in plan.loops])
    return Predicted(seconds + profile.overhead_s, error, means)


def _pace(took: Sequence[Seconds], lags: Sequence[int]) -> float:
    """Seconds of an iteration in the long run, of one loop or of one that generates ahead of one that trains."""
    if len(took) == 1:
        return float(took[0].mean())
    generation, training, lag = took[0], took[-1], max(lags)
    num_iterations, trained, generated = 8 * len(generation), list[float](), 0.0
    for iteration in range(num_iterations):
        draw = iteration % len(generation)
        # Weights of `lag + 1` iterations before; rows of this one.
        weights = trained[iteration - lag - 1] if iteration > lag else 0.0
        generated = max(generated, weights) + float(generation[draw])
        trained.append(max(generated, trained[-1] if trained else 0.0) + float(training[draw]))
    first = len(generation)
    return (trained[-1] - trained[first - 1]) / (num_iterations - first)


def _loop_seconds(plan: Plan, loop: Loop, profile: Profile, nodes: dict[str, Seconds], num_draws: int) -> Seconds:
    """[draws] seconds of an iteration of a loop, from its first entry to its last."""
    actions = [action for action in flat(loop.schedule) if not isinstance(action, Load)]
    places = _kinds_of_ranks(plan, loop, actions)
    clocks = np.zeros((max((place for ranks in places for place in ranks), default=0) + 1, num_draws))
    for action, chosen in zip(actions, places, strict=True):
        if chosen:
            clocks[chosen] = clocks[chosen].max(axis=0) + sum(_seconds_of(action, plan, profile, nodes))
    slowest: Seconds = clocks.max(axis=0)
    return slowest


def _kinds_of_ranks(plan: Plan, loop: Loop, actions: Sequence[Action]) -> list[list[int]]:
    """For each entry the kinds of ranks that take part; ranks of one kind take part in the same entries."""
    sets = [frozenset(plan.ranks_of(action)) & frozenset(loop.ranks) for action in actions]
    kinds: dict[tuple[bool, ...], int] = {}
    distinct = list(dict.fromkeys(sets))
    for rank in loop.ranks:
        kinds.setdefault(tuple(rank in ranks for ranks in distinct), len(kinds))
    place = {ranks: [kind for key, kind in kinds.items() if key[index]] for index, ranks in enumerate(distinct)}
    return [place[ranks] for ranks in sets]


def _seconds_of(action: Action, plan: Plan, profile: Profile, nodes: dict[str, Seconds]) -> Iterator[Seconds | float]:
    match action:
        case RunNode(name):
            yield nodes[name]
        case Reshard():
            yield profile.reshard_s
        case SyncWeights():
            yield profile.sync_s
        case Pull(name):
            channel = plan.channel(name)
            yield len(channel.reshards) * profile.reshard_s + (channel.sync is not None) * profile.sync_s
        case Push() | _:
            yield 0.0
