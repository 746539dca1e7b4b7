"""Exchanges the metrics of a step between ranks, and lets them agree on how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import torch

from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.distributed.weights.sent import Traffic
from leaderless.observability.clock import PREFIX, Clock, State, seconds_name
from leaderless.observability.events import GuardEvent
from leaderless.observability.metrics import Metrics
from leaderless.planner import Action, Load, Plan, PlannedNode, Pull, Push, RunNode, SyncWeights, flat, format_ranks
from leaderless.planner.plan import metric_pools

LOG = "log"
"""Lane in which ranks that generate continuously add up what they report."""
Judge = Callable[[Mapping[str, float], Sequence[PlannedNode]], Sequence[GuardEvent]]
"""Finds events in the numbers of a pool, for the nodes that run on it; it is called on the pool's first rank."""


class StepMetrics:
    """Metrics of the pools of a loop: each pool adds up its own, and the loop's first rank receives them all."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        self._plan, self._transport = plan, transport
        self._loop = plan.loop_of(transport.rank)
        self._pools = list(metric_pools(plan, self._loop))
        self._metrics = {ranks: Metrics() for ranks in self._pools if transport.rank in ranks}

    def of(self, ranks: tuple[int, ...]) -> Metrics:
        """Metrics of the pool with these ranks."""
        return self._metrics[ranks]

    def of_node(self, node: PlannedNode) -> Metrics:
        """Metrics of a node: of the ranks with the same rows one reports, and what others collect is left out."""
        layout = node.layout
        return self.of(layout.representatives) if layout.represents(self._transport.rank) else Metrics()

    def take(self) -> StepMetrics:
        """The numbers of the step, to be added up in any thread; begin again with nothing."""
        taken, self._metrics = copy(self), {ranks: Metrics() for ranks in self._metrics}
        return taken

    def reduce(
        self, judge: Judge, process_group: Callable[[tuple[int, ...]], ProcessGroup]
    ) -> tuple[dict[str, float], list[GuardEvent]]:
        """Add up the numbers. All ranks of the loop call it together.

        Args:
            judge: Function that finds events in the numbers of a pool.
            process_group: Function that finds the process group of some ranks, for this thread.

        Returns:
            All numbers on the loop's first rank, some of them on others, but for states that no rank was in; and the
            events of pools whose first rank this is.
        """
        rank, loop = self._transport.rank, process_group(self._loop.ranks)
        numbers, events = dict[str, float](), list[GuardEvent]()
        for ranks in self._pools:
            own = self._metrics[ranks].reduce(process_group(ranks)) if rank in ranks else {}
            if rank == ranks[0]:
                events += judge(own, [node for node in self._plan.nodes if node.layout.representatives == ranks])
            numbers |= to_first_rank(ranks, own, loop)
        numbers = {name: value for name, value in numbers.items() if value or not name.startswith(PREFIX)}
        return numbers, events


def to_first_rank(ranks: tuple[int, ...], numbers: dict[str, float], loop: ProcessGroup) -> dict[str, float]:
    """Send numbers that `ranks` of a loop agree on to its first rank, if it is not one of them; both have them then.

    All ranks of the loop call it together.
    """
    first = loop.ranks[0]
    if first in ranks or loop.rank not in {first, ranks[0]}:
        return numbers
    if loop.rank == ranks[0]:
        text = torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)
        loop.exchange({first: text}, [], "the log")
        return numbers
    message = loop.exchange({}, [ranks[0]], f"the numbers of ranks {format_ranks(ranks)}")[ranks[0]]
    received: dict[str, float] = json.loads(bytes(message.numpy()))
    return received


@dataclass(frozen=True)
class StepEnd:
    """How a step has ended, the same on every rank of a loop.

    Attributes:
        is_stopping: A signal has asked some rank to stop.
        is_checkpoint_due: A checkpoint is due on some rank.
        data_position: Number of prompts taken from the data.
        events: Events that the guards of all nodes have reported.
    """

    is_stopping: bool
    is_checkpoint_due: bool
    data_position: int
    events: tuple[GuardEvent, ...] = ()

    @property
    def is_doubtful(self) -> bool:
        """Whether an update was left out because its numbers were not finite, and the weights may be the reason."""
        return any(event.action == "skip" and event.guard.startswith("non_finite") for event in self.events)


def agree(mine: StepEnd, loop: ProcessGroup) -> StepEnd:
    """Combine what each rank of a loop knows, where each event is known to one rank only. All of them call it together.

    More than four numbers are exchanged only where a guard has reported an event.
    """
    numbers = [int(mine.is_stopping), int(mine.is_checkpoint_due), mine.data_position, len(mine.events)]
    is_stopping, is_due, data_position, num_events = loop.max(torch.tensor(numbers), "how the step ended").tolist()
    events: list[GuardEvent] = []
    if num_events:
        # JSON cannot hold some of the values, so their exact text comes with them.
        lines = "".join(json.dumps([event.to_json(), str(event.value)]) + "\n" for event in mine.events)
        encoded = torch.tensor(list(lines.encode()), dtype=torch.uint8)
        gathered = torch.cat(loop.gather(encoded, "what guards have seen"))
        for line in bytes(gathered.numpy()).decode().splitlines():
            values, number = json.loads(line)
            events.append(GuardEvent.from_json(values | {"value": float(number)}))
    return StepEnd(bool(is_stopping), bool(is_due), data_position, tuple(events))


def state_of(action: Action, plan: Plan, rank: int) -> State:
    """The state of a rank in an entry of its chain; what the entry waits for has states of its own."""
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


def sync_of(action: Action, plan: Plan) -> SyncWeights | None:
    """The weights that an entry sends at once or puts into a channel, if it does."""
    if isinstance(action, Push):
        return plan.channel(action.channel).sync
    return action if isinstance(action, SyncWeights) else None


def report_traffic(sync: SyncWeights, traffic: Traffic, metrics: Metrics) -> None:
    """Report what a rank has sent of new weights."""
    metrics.total(f"sent/bytes/{sync}", traffic.num_bytes)
    metrics.total(f"sent/whole_bytes/{sync}", traffic.whole_bytes)
    metrics.mean(f"sent/changed/{sync}", traffic.num_changed, traffic.num_compared)
    metrics.max(f"sent/seconds/{sync}", traffic.seconds)


def pools_of(plan: Plan, ranks: Sequence[int]) -> dict[tuple[int, ...], str]:
    """Pools of ranks that run the same nodes, by their ranks, each with its name, such as `0-3`."""
    members: dict[frozenset[str], list[int]] = {}
    for rank in ranks:
        nodes = frozenset(action.node for action in flat(plan.chain(rank)) if isinstance(action, RunNode))
        members.setdefault(nodes, []).append(rank)
    return {tuple(pool): format_ranks(tuple(pool)) for pool in members.values()}


class SecondsReport:
    """Report of the pools of a loop: for each state, the mean of the seconds of their ranks.

    Attributes:
        taken: Seconds of this rank in each state of the last iteration.
    """

    def __init__(self, plan: Plan, rank: int, clock: Clock) -> None:
        self.taken: Mapping[State, float] = {}
        self._pools, self._rank, self._clock = pools_of(plan, plan.loop_of(rank).ranks), rank, clock

    def add_to(self, metrics: Metrics) -> None:
        """Add the seconds since the last call to the metrics of the loop."""
        self.taken = taken = self._clock.take()
        for ranks, pool in self._pools.items():
            is_here = self._rank in ranks
            for state, seconds in taken.items():
                metrics.mean(seconds_name(pool, state), seconds if is_here else 0.0, int(is_here))
