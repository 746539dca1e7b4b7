"""The metrics of a step: each pool adds up its own, and rank 0 receives them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch

from leaderless.data.transport import Transport
from leaderless.observability.metrics import Metrics
from leaderless.planner import Plan, PlannedNode, flat, format_ranks

Judge = Callable[[Mapping[str, float], Sequence[PlannedNode]], None]
"""Receives the numbers of a pool and the nodes that run on it, on the pool's first rank."""


class StepMetrics:
    """Metrics of the pools that a rank belongs to."""

    def __init__(self, plan: Plan, transport: Transport) -> None:
        """Begin with nothing.

        Args:
            plan: Plan with the pools.
            transport: Process groups of the pools.
        """
        self._plan, self._transport = plan, transport
        self._pools = list(dict.fromkeys(plan.ranks_of(action) for action in flat(plan.schedule)))
        self._metrics = {ranks: Metrics() for ranks in self._pools if transport.rank in ranks}

    def of(self, ranks: tuple[int, ...]) -> Metrics:
        """Metrics of a pool.

        Args:
            ranks: Ranks of the pool.
        """
        return self._metrics[ranks]

    def reduce(self, judge: Judge) -> dict[str, float]:
        """Add up the step's numbers, and begin again with nothing. All ranks call it together.

        Args:
            judge: Function that looks at the numbers of each pool.

        Returns:
            All numbers on rank 0, some of them on others.
        """
        rank, numbers = self._transport.rank, dict[str, float]()
        for ranks in self._pools:
            own = self._metrics[ranks].reduce(self._transport.process_group(ranks)) if rank in ranks else {}
            if rank == ranks[0]:
                judge(own, [node for node in self._plan.nodes if node.layout.ranks == ranks])
            numbers |= to_first_rank(ranks, own, self._transport)
        self._metrics = {ranks: Metrics() for ranks in self._metrics}
        return numbers


def to_first_rank(ranks: tuple[int, ...], numbers: dict[str, float], transport: Transport) -> dict[str, float]:
    """Send numbers that some ranks agree on to rank 0, if it is not one of them. All ranks call it together.

    Args:
        ranks: Ranks that have the numbers; the first of them sends.
        numbers: Numbers by name.
        transport: Connection to rank 0.

    Returns:
        The numbers on rank 0 and on `ranks`.
    """
    world = transport.world
    if 0 in ranks or world.rank not in {0, ranks[0]}:
        return numbers
    if world.rank == ranks[0]:
        text = torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)
        world.exchange({0: text}, [], "the log")
        return numbers
    message = world.exchange({}, [ranks[0]], f"the numbers of ranks {format_ranks(ranks)}")[ranks[0]]
    received: dict[str, float] = json.loads(bytes(message.numpy()))
    return received
