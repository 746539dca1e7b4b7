"""Whether ranks could wait for each other in a circle: the proof that a plan cannot deadlock, as code.

Each entry of a loop is an event of every iteration. An event waits for others: an entry for the one before it, the
first of an iteration for the last of the iteration before; a pull for the push of what it takes; and a push, as at most
`capacity` iterations may be in flight, for the pull of an earlier one. Each wait has a delay: an event of iteration k
waits for one of iteration k - delay. If the delays along every circle of waits add up to at least 1, no event waits for
itself or for its own future, so some rank can always continue. `docs/architecture.md` has the argument in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from leaderless.planner.entries import Pull, Push
from leaderless.planner.plan_parts import Channel, Loop


@dataclass(frozen=True)
class Wait:
    """An event that waits for another one, some iterations before it; an event is a loop and one of its entries."""

    event: tuple[str, str]
    awaited: tuple[str, str]
    delay: int


def lag_of(channel: Channel, loops: Sequence[Loop]) -> int:
    """Iterations between the one that puts something into a channel and the one that takes it out.

    Rows are trained in the iteration of the same number, surplus in the next. Weights are used in the first iteration
    that training with lag 0 would use them in, and as many later as the loop is ahead.
    """
    if channel.source == channel.target:
        return 1
    if channel.kind == "rows":
        return 0
    return 1 + next(loop.lag for loop in loops if loop.name == channel.target)


def waits_of(loops: Sequence[Loop], channels: Sequence[Channel]) -> Iterator[Wait]:
    """All waits of the loops' pushes and pulls; entries between them wait for nothing outside their loop.

    A channel without capacity is a meeting: either end waits for all that comes before the other.
    """
    before: dict[tuple[str, str], tuple[tuple[str, str], int]] = {}
    for loop in loops:
        events = [(loop.name, str(entry)) for entry in loop.schedule if isinstance(entry, Push | Pull)]
        for place, event in enumerate(events):
            before[event] = events[place - 1], 0 if place else 1
            yield Wait(event, *before[event])
    for channel in channels:
        push = channel.source, str(Push(channel.name))
        pull = channel.target, str(Pull(channel.name))
        if push not in before or pull not in before:
            continue  # surplus stays on its ranks
        lag = lag_of(channel, loops)
        if channel.capacity:
            yield Wait(pull, push, lag)
            yield Wait(push, pull, channel.capacity - lag)
        else:
            (before_push, first), (before_pull, second) = before[push], before[pull]
            yield Wait(pull, before_push, lag + first)
            yield Wait(push, before_pull, second - lag)


def find_circle(loops: Sequence[Loop], channels: Sequence[Channel]) -> tuple[str, ...]:
    """Events that wait for each other in a circle, by name; empty if there are none, and the ranks cannot deadlock."""
    waits = list(waits_of(loops, channels))
    events = list(dict.fromkeys(wait.event for wait in waits))
    # Bellman-Ford: a circle of at most `len(events)` waits has a negative cost if its delays add up to 0 or less.
    cost = dict.fromkeys(events, 0)
    via: dict[tuple[str, str], tuple[str, str]] = {}
    changed: tuple[str, str] | None = None
    for _ in range(len(events) + 1):
        changed = None
        for wait in waits:
            reached = cost[wait.awaited] + wait.delay * (len(events) + 1) - 1
            if reached < cost[wait.event]:
                cost[wait.event], via[wait.event], changed = reached, wait.awaited, wait.event
        if changed is None:
            return ()
    assert changed is not None, "costs that still change have a circle"
    for _ in events:  # from any event behind a circle back into it
        changed = via[changed]
    circle = [changed]
    while via[circle[-1]] != changed:
        circle.append(via[circle[-1]])
    return tuple(f"{name}: {entry}" for name, entry in circle)
