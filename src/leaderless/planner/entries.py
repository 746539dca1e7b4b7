"""Chain entries: what ranks do in an iteration of a loop, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leaderless.planner.layout import Layout, all_ranks, format_ranks

QUADRATIC_TOKENS = 24_576
"""`Reshard.quadratic_tokens` of a model of unknown size: about 12 times the hidden size, taken to be 2,048."""


@dataclass(frozen=True)
class Load:
    """Chain entry: take this rank's prompts from the dataloader.

    Where a loop generates continuously, a rank does so whenever it may begin more of them. Where rows are trained in
    several updates on the ranks that load them, ranks take prompts in turns: each has some of every update.

    Attributes:
        layout: Ranks that load.
        columns: Columns of the prompts.
        portions: Relative shares of the prompts of a step of each rank; empty if all are equal.
        in_turns: Whether the ranks take prompts in turns, instead of a part of the step each.
    """

    layout: Layout
    columns: tuple[str, ...]
    portions: tuple[int, ...] = ()
    in_turns: bool = False

    def __str__(self) -> str:
        return "load"


@dataclass(frozen=True)
class RunNode:
    """Chain entry: run a node."""

    node: str

    def __str__(self) -> str:
        return self.node


@dataclass(frozen=True)
class Reshard:
    """Chain entry: send columns of one node, the source, to another layout, where nodes read them.

    Where groups are kept, samples of one prompt go to one shard. A late entry sends more columns of rows that the
    target layout has already. A spare layout has the same columns from an earlier entry, so that its ranks keep theirs.
    Where the rows are trained in several updates, the work of each is balanced. A row of `quadratic_tokens` costs the
    model that reads it as much in attention as in all matrix products.
    """

    source: str
    row_set: str
    columns: tuple[str, ...]
    source_layout: Layout
    target_layout: Layout
    keep_groups: bool
    is_late: bool = False
    spare_layout: Layout | None = None
    num_updates: int = 1
    quadratic_tokens: int = QUADRATIC_TOKENS

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return all_ranks(self.source_layout, self.target_layout)

    @property
    def name(self) -> str:
        """Name in errors and traces."""
        return f"{self.source}->{format_ranks(self.target_layout.ranks)}"

    def __str__(self) -> str:
        return f"reshard({self.name})"


@dataclass(frozen=True)
class SyncWeights:
    """Chain entry: send a role's new weights from the ranks that train it to those that use a copy of it."""

    role: str
    source_layout: Layout
    target_layout: Layout

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        return all_ranks(self.source_layout, self.target_layout)

    def __str__(self) -> str:
        return f"weights({self.role}->{format_ranks(self.target_layout.ranks)})"


@dataclass(frozen=True)
class Repeat:
    """Chain entry: run other entries, round after round, until the last node has chosen `num_groups` groups.

    Groups are counted on the layout of the last node. Surplus groups of an earlier step are counted before the first
    round. Those with the lowest ids are used; the surplus waits for the next step.
    """

    nodes: tuple[str, ...]
    layout: Layout
    ranks: tuple[int, ...]
    num_groups: int
    max_rounds: int
    body: tuple[Action, ...]

    @property
    def last(self) -> str:
        """Node whose groups are counted."""
        return self.nodes[-1]

    def __str__(self) -> str:
        return f"repeat({' -> '.join(map(str, self.body))})"


@dataclass(frozen=True)
class Windowed:
    """Chain entry: run other entries window by window, a window being a part of each rank's prompts in order.

    Each entry is as many windows behind the first as its delay says. Reshards run in the background.
    """

    body: tuple[Action, ...]
    delays: tuple[int, ...]
    num_windows: int
    ranks: tuple[int, ...]

    def turns(self) -> Iterator[tuple[Action, int]]:
        """Entries and the window that each works on, in the order that every rank keeps."""
        for turn in range(self.num_windows + max(self.delays, default=0)):
            for action, delay in zip(self.body, self.delays, strict=True):
                if 0 <= turn - delay < self.num_windows:
                    yield action, turn - delay

    def __str__(self) -> str:
        return f"windows({' -> '.join(map(str, self.body))})"


@dataclass(frozen=True)
class Push:
    """Chain entry: put what this iteration has made into a channel, and continue while it is sent."""

    channel: str

    def __str__(self) -> str:
        return f"push({self.channel})"


@dataclass(frozen=True)
class Pull:
    """Chain entry: wait for what this iteration needs from a channel, and take it."""

    channel: str

    def __str__(self) -> str:
        return f"pull({self.channel})"


Action = Load | RunNode | Reshard | SyncWeights | Repeat | Windowed | Push | Pull


def flat(actions: Sequence[Action]) -> Iterator[Action]:
    """Chain entries, each repetition and window entry followed by those inside it."""
    for action in actions:
        yield action
        if isinstance(action, Repeat | Windowed):
            yield from flat(action.body)


def walked(schedule: Sequence[Action]) -> Iterator[tuple[Action, int, int]]:
    """Entries on the way of ranks, the window that each works on, and the number of windows; what is repeated, once."""
    for action in schedule:
        if isinstance(action, Windowed):
            yield from ((inner, window, action.num_windows) for inner, window in action.turns())
        else:
            yield from ((inner, 0, 1) for inner in flat([action]))
