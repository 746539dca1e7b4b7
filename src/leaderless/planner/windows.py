"""Which nodes can work on a window of a step's rows while others are on their way, and how far behind each runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from leaderless.planner.flow import DATA
from leaderless.planner.plan import Action, PlannedNode, Reshard, RunNode, Windowed


@dataclass(frozen=True)
class Delays:
    """Of nodes that stream: how many windows each is behind the first node.

    A change of layout takes as long as a window, so that it goes on in the background meanwhile.

    Attributes:
        of_node: By name; the nodes that do not stream are not in it.
    """

    of_node: Mapping[str, int]

    @classmethod
    def of(cls, nodes: Sequence[PlannedNode]) -> Delays:
        """Find the nodes that stream: their stages can, and so can all that they get rows or columns from.

        Nodes that only add to the data's own rows do not: each layout loads those by itself, in windows of its own.

        Args:
            nodes: That run, in order.
        """
        delays: dict[str, int] = {}
        layouts = {node.name: node.layout for node in nodes}
        for node in nodes:
            sources = {node.row_set, *node.reads.values()} - {DATA}
            if node.spec.streams and node.row_set_after != DATA and sources <= delays.keys():
                delays[node.name] = max(
                    (delays[name] + (not layouts[name].holds_rows_like(node.layout)) for name in sources), default=0
                )
        return cls(delays)

    def of_action(self, action: Action) -> int | None:
        """How many windows an entry of the chain is behind; None if it is not part of the stream.

        Args:
            action: Of the schedule.
        """
        match action:
            case RunNode(name):
                return self.of_node.get(name)
            case Reshard():
                return self.of_node.get(action.source)
            case _:
                return None


def stream(nodes: Sequence[PlannedNode], schedule: Sequence[Action], num_windows: int) -> list[Action]:
    """The same schedule, with the entries that can stream in a stream, if any rows change ranks among them.

    Args:
        nodes: That run, in order.
        schedule: All entries, without a loop.
        num_windows: Into which rows are divided.
    """
    delays = Delays.of(nodes)
    if num_windows == 1 or not any(isinstance(a, Reshard) and delays.of_action(a) is not None for a in schedule):
        return list(schedule)
    layouts = {node.name: node.layout for node in nodes}
    behind = {action: delay for action in schedule if (delay := delays.of_action(action)) is not None}
    ranks: set[int] = set()
    for action in behind:
        ranks.update(layouts[action.node].ranks if isinstance(action, RunNode) else ())
        ranks.update(action.ranks if isinstance(action, Reshard) else ())
    first = next(place for place, action in enumerate(schedule) if action in behind)
    rest = [action for action in schedule[first:] if action not in behind]
    entry = Windowed(tuple(behind), tuple(behind.values()), num_windows, tuple(sorted(ranks)))
    return [*schedule[:first], entry, *rest]
