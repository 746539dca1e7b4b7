"""Where the time of a loop's ranks goes: the state of each entry of the plan, and what is reported of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leaderless.observability.clock import Clock, State
from leaderless.observability.metrics import Metrics
from leaderless.observability.seconds import PREFIX, seconds_name
from leaderless.planner import Action, Load, Plan, Pull, Push, RunNode, SyncWeights, flat, format_ranks


def state_of(action: Action, plan: Plan, rank: int) -> State:
    """The state of a rank in an entry of its chain; what the entry waits for has states of its own.

    Args:
        action: The entry.
        plan: Plan of the run.
        rank: The rank.
    """
    match action:
        case RunNode(name):
            node = plan[name]
            use = node.spec.role_use
            if use != "none":
                return use
            return "grade" if "reward_valid" in node.writes else "compute"
        case Load():
            return "data"
        case SyncWeights():
            return "weights" if rank in action.source_layout else "wait_weights"
        case Push(name) if plan.channel(name).kind == "weights":
            return "weights"
        case Pull(name) if plan.channel(name).kind == "weights":
            return "wait_weights"
        case _:
            return "move"


def pools_of(plan: Plan, ranks: Sequence[int]) -> dict[tuple[int, ...], str]:
    """Pools of ranks that run the same nodes, by their ranks, each with its name, such as `0-3`."""
    members: dict[frozenset[str], list[int]] = {}
    for rank in ranks:
        nodes = frozenset(action.node for action in flat(plan.chain(rank)) if isinstance(action, RunNode))
        members.setdefault(nodes, []).append(rank)
    return {tuple(pool): format_ranks(tuple(pool)) for pool in members.values()}


class SecondsReport:
    """What the pools of a loop report: for each state, the mean of the seconds of their ranks.

    Attributes:
        taken: Seconds of this rank in each state of the last iteration.
    """

    def __init__(self, plan: Plan, rank: int, clock: Clock) -> None:
        """Report what a rank's clock says."""
        self.taken: Mapping[State, float] = {}
        self._pools, self._rank, self._clock = pools_of(plan, plan.loop_of(rank).ranks), rank, clock

    def add_to(self, metrics: Metrics) -> None:
        """Add the seconds since the last call to the metrics of the loop."""
        self.taken = taken = self._clock.take()
        for ranks, pool in self._pools.items():
            is_here = self._rank in ranks
            for state, seconds in taken.items():
                metrics.mean(seconds_name(pool, state), seconds if is_here else 0.0, int(is_here))


def without_idle(numbers: Mapping[str, float]) -> dict[str, float]:
    """Numbers without the states that no rank of a pool was in."""
    return {name: value for name, value in numbers.items() if value or not name.startswith(PREFIX)}
