"""Finds the first difference between two lines of a journal of episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from leaderless.base.values import Json
from leaderless.environments.journal import Line, episode_of, text_of

DIFFERENT = "different"
"""Cause of the end of an episode that does not go as the journal says."""
SHOWN_CHARACTERS = 160
"""Length at which values in a difference are cut."""


@dataclass(frozen=True)
class JournalDifference:
    """Difference from the journal.

    Attributes:
        place: Turn and value.
        expected: Beginning of the value in the journal, from shortly before the difference.
        found: Beginning of the value that was found, from the same place.
    """

    place: str
    expected: str
    found: str


def first_difference(expected: Line, found: Line) -> JournalDifference | None:
    """The first difference between two lines of an episode, in the order in which it was played; None if they agree."""
    known, new = _plain(expected), _plain(found)
    for place, one, other in _pairs(known, new):
        if one != other:
            return _shown(place, one, other)
    return None


def _pairs(known: Mapping[str, Json], new: Mapping[str, Json]) -> Iterator[tuple[str, Json, Json]]:
    """Values to compare, with their places, in the order of the turns; the last ones are whole lines."""
    yield "agents", known["agents"], new["agents"]
    answers, others = (cast("list[Mapping[str, Json]]", line["answers"]) for line in (known, new))
    for number, (one, other) in enumerate(zip(answers, others, strict=False)):
        place = f"answer of the environment to turn {number}" if number else "first observation"
        for name in (key for key in one if key != "seconds"):
            yield place if name == "observation" else f"{place}, {name}", one[name], other.get(name)
    if new["cause"] not in {known["cause"], DIFFERENT}:
        yield "end of the episode, error", known["error"], new["error"]
    if not answers and not others:  # a program may ask several questions at once, in any order
        yield "what the policy said, and on what", _said_in(known), _said_in(new)
    else:
        yield from _pairs_of_messages(known, new)
    for name in ("cause", "error", "is_cut", "info"):
        yield f"end of the episode, {name}", known[name], new[name]
    yield "number of answers", len(answers), len(others)
    yield "number of messages", len(cast("list[Json]", known["nodes"])), len(cast("list[Json]", new["nodes"]))


def _said_in(line: Line) -> Json:
    """Messages of a policy, with all that they followed on, in a custom order, and the sum of its rewards."""
    nodes = [node for node in episode_of(line).trace.said() if node.parent is not None]
    said = sorted([node.parent.context(), list(node.tokens)] for node in nodes if node.parent is not None)
    return cast("Json", [*said, sum(node.said.reward for node in nodes if node.said)])


def _pairs_of_messages(known: Line, new: Line) -> Iterator[tuple[str, Json, Json]]:
    nodes, new_nodes = (cast("list[Mapping[str, Json]]", line["nodes"]) for line in (known, new))
    turn = 0
    for one, other in zip(nodes, new_nodes, strict=False):
        turn += one["said"] is not None
        place = f"turn {turn}" if one["said"] is not None else f"what is told before turn {turn + 1}"
        for name in one:
            yield f"{place}, {name}", _compared(one[name]), _compared(other.get(name))


def _compared(value: Json) -> Json:
    """A value of a message, without what says how it came to be said."""
    if not isinstance(value, Mapping):
        return value
    return {name: one for name, one in value.items() if name not in {"is_repeated", "temperature"}}


def _shown(place: str, expected: Json, found: Json) -> JournalDifference:
    one, other = (value if isinstance(value, str) else json.dumps(value) for value in (expected, found))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - SHOWN_CHARACTERS // 4)

    def cut(text: str) -> str:
        end = begin + SHOWN_CHARACTERS
        return f"{'…' if begin else ''}{text[begin:end]}{'…' if len(text) > end else ''}"

    return JournalDifference(place, cut(one), cut(other))


def _plain(line: Line) -> Mapping[str, Json]:
    """A line as it is read from a file."""
    return cast("Mapping[str, Json]", json.loads(text_of(line)))
