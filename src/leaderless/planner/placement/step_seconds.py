"""The seconds of a step of a plan, from measured seconds of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from leaderless.planner.entries import Action, Load, Pull, Reshard, RunNode, SyncWeights, walked
from leaderless.planner.placement.continuous import Pools, step_seconds
from leaderless.planner.placement.node_seconds import Seconds, StepSeconds, has_own_rows
from leaderless.planner.placement.stage_seconds import Profile
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Loop


@dataclass(frozen=True)
class Predicted:
    """A step of a plan.

    Attributes:
        seconds: Duration, on average.
        error: Relative error to be expected: the errors of its nodes' laws, weighted by their seconds.
        nodes: Seconds of each node's slowest rank.
    """

    seconds: float
    error: float
    nodes: dict[str, float]


def predict(plan: Plan, profile: Profile, steps: StepSeconds) -> Predicted:
    """Walk through the plan's schedule with the clocks of its ranks; several loops go on next to each other."""
    means = {node.name: float(_of_node(plan, node.name, steps).sum(axis=0).mean()) for node in plan.nodes}
    laws = {name: profile.stages[name].error for name in means if name in profile.stages}
    total = sum(means[name] for name in laws) or 1.0
    error = sum(means[name] * laws[name] for name in laws) / total
    return Predicted(_seconds(plan, profile, steps) + profile.overhead_s, error, means)


def _seconds(plan: Plan, profile: Profile, steps: StepSeconds) -> float:
    """Seconds of an iteration in the long run."""
    training = _LoopClocks(plan, plan.loops[-1], profile, steps).seconds()
    if plan.loops[0].is_continuous:
        return step_seconds(_pools(plan, plan.loops[0], training, profile, steps))
    took = [*(_LoopClocks(plan, loop, profile, steps).seconds() for loop in plan.loops[:-1]), training]
    handed_s = profile.reshard_s * sum(len(channel.reshards) for channel in plan.channels)
    travel_s = profile.sync_s * sum(channel.sync is not None for channel in plan.channels)
    return _pace(took, [loop.lag for loop in plan.loops], handed_s, travel_s)


def _pools(plan: Plan, loop: Loop, training: Seconds, profile: Profile, steps: StepSeconds) -> Pools:
    """The pools of a plan whose first loop generates continuously."""
    sampler = next(plan[name] for name in loop.nodes if plan[name].spec.samples)
    load = next(entry for entry in loop.schedule if isinstance(entry, Load))
    rates = steps.rates(sampler, load.portions or (1,) * sampler.layout.dp)
    ahead = [name for name in loop.nodes if steps.is_graded_ahead(plan[name])]
    others = [_of_node(plan, name, steps).sum(axis=0) for name in loop.nodes if name not in (sampler.name, *ahead)]
    graded = sum((_of_node(plan, name, steps).sum(axis=0) for name in ahead), np.zeros(steps.num_draws))
    syncs_s = profile.sync_s * sum(isinstance(entry, Pull) for entry in loop.schedule)
    helping = np.isin(sampler.layout.representatives, list(plan.helpers))
    uses = [name for name in plan.loops[-1].nodes if plan[name].spec.roles]
    device_s = float(sum(_of_node(plan, name, steps).sum(axis=0).mean() for name in uses))
    besides = sum(others, np.full(steps.num_draws, syncs_s))
    return Pools(rates, besides, graded, training, loop.lag, helping, device_s)


def _of_node(plan: Plan, name: str, steps: StepSeconds, num_windows: int = 1) -> Seconds:
    """[windows, draws] seconds of a node's slowest rank."""
    node = plan[name]
    return steps.of_windows(node, node.layout.dp, num_windows, is_balanced=not has_own_rows(node, plan))


def _pace(took: Sequence[Seconds], lags: Sequence[int], handed_s: float = 0.0, travel_s: float = 0.0) -> float:
    """Seconds of an iteration in the long run, of one loop or of one that generates ahead of one that trains.

    Args:
        took: [draws] seconds of an iteration of each loop.
        lags: Iterations that each loop is ahead.
        handed_s: Seconds at the beginning of an iteration that trains, in which rows arrive. Until then they are in
            flight, and as many iterations may be as generation is ahead.
        travel_s: Seconds of new weights on their way, while both loops work; one iteration's come after the other's.
    """
    if len(took) == 1:
        return float(took[0].mean())
    generation, training, lag = took[0], took[-1], max(lags)
    num_iterations, trained, generated = 8 * len(generation), list[float](), 0.0
    arrived, received = list[float](), list[float]()
    for iteration in range(num_iterations):
        draw = iteration % len(generation)
        # Weights of `lag + 1` iterations before; rows of this one.
        weights = received[iteration - lag - 1] if iteration > lag else 0.0
        free = arrived[iteration - lag] if iteration >= lag > 0 else 0.0
        generated = max(generated, weights, free) + float(generation[draw])
        begin = max(generated, trained[-1] if trained else 0.0)
        arrived.append(begin + handed_s)
        trained.append(begin + float(training[draw]))
        received.append(max(trained[-1], received[-1] if received else 0.0) + travel_s)
    first = len(generation)
    return (trained[-1] - trained[first - 1]) / (num_iterations - first)


class _LoopClocks:
    """The clocks of a loop's ranks in an iteration; ranks that take part in the same entries have one clock."""

    def __init__(self, plan: Plan, loop: Loop, profile: Profile, steps: StepSeconds) -> None:
        self._plan, self._profile, self._steps = plan, profile, steps
        self._entries = [entry for entry in walked(loop.schedule) if not isinstance(entry[0], Load)]
        taking_part = [plan.ranks_of(action) for action, _, _ in self._entries]
        layouts = [plan[name].layout.ranks for name in loop.nodes]
        self._kinds = _kinds_of_ranks(loop, [*taking_part, *layouts])
        self._clocks = np.zeros((max(self._kinds.values(), default=0) + 1, steps.num_draws))
        self._arrived: dict[tuple[tuple[int, ...], int], Seconds] = {}

    def seconds(self) -> Seconds:
        """[draws] seconds from the first entry to the last."""
        for action, window, num_windows in self._entries:
            self._enter(action, window, num_windows)
        slowest: Seconds = self._clocks.max(axis=0)
        return slowest

    def _enter(self, action: Action, window: int, num_windows: int) -> None:
        chosen = self._of(self._plan.ranks_of(action))
        if not chosen:
            return
        if isinstance(action, Reshard) and num_windows > 1:
            # Rows of a window travel in the background.
            sent = self._clocks[self._of(action.source_layout.ranks)].max(axis=0) + self._profile.reshard_s
            key = action.target_layout.ranks, window
            self._arrived[key] = np.maximum(sent, self._arrived.get(key, 0.0))
            return
        begin = self._clocks[chosen].max(axis=0)
        if isinstance(action, RunNode):
            arrived = self._arrived.get((self._plan[action.node].layout.ranks, window), 0.0)
            took = _of_node(self._plan, action.node, self._steps, num_windows)[window]
            self._clocks[chosen] = np.maximum(begin, arrived) + took
        else:
            self._clocks[chosen] = begin + _transfer_seconds(action, self._plan, self._profile)

    def _of(self, ranks: Iterable[int]) -> list[int]:
        """The clocks of ranks."""
        return sorted({self._kinds[rank] for rank in ranks if rank in self._kinds})


def _kinds_of_ranks(loop: Loop, sets: Sequence[Iterable[int]]) -> dict[int, int]:
    """The kind of each rank of a loop; ranks of one kind are in the same sets."""
    distinct = list(dict.fromkeys(frozenset(ranks) for ranks in sets))
    kinds: dict[tuple[bool, ...], int] = {}
    return {rank: kinds.setdefault(tuple(rank in ranks for ranks in distinct), len(kinds)) for rank in loop.ranks}


def _transfer_seconds(action: Action, plan: Plan, profile: Profile) -> float:
    """Seconds of an entry that is no node."""
    match action:
        case Reshard():
            return profile.reshard_s
        case SyncWeights():
            return profile.sync_s
        case Pull(name):
            return len(plan.channel(name).reshards) * profile.reshard_s
        case _:
            return 0.0
