"""Episodes as lines of a journal, from which they can be played again without model or environment, and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from leaderless.base.values import Json
from leaderless.config.failures import FailureKind
from leaderless.environments.episode import Episode, FailureNote, RecordedAnswer, Said, Trace
from leaderless.environments.pictures import put_back, taken_out
from leaderless.environments.protocol import Message, Turn
from leaderless.environments.tools import CallResult

Line = Mapping[str, Json]
"""A line of the journal."""
_EARLIER: Mapping[str, FailureKind] = {"timeout": "deadline", "crash": "infrastructure", "overflow": "environment"}
"""Kinds of failures by words that were in journals before there were kinds."""


def line_of(episode: Episode) -> dict[str, Json]:
    """Record of an episode that was played here, with which it can be played again.

    Log-probabilities have as many digits as tell one float32 from the next.
    """
    place = episode.place
    assert place is not None, "an episode has a place where it is played"
    numbers = {id(node): number for number, node in enumerate(episode.trace.nodes)}
    images: dict[str, int] = {}  # each is written once
    line = {
        "id": place.number,
        "seed": place.seed,
        "temperature": place.params.distribution.temperature,
        "attempt": episode.attempts - 1,
        "task": place.task,
        "agents": episode.agents,
        "answers": [
            vars(answer.turn)
            | {"observation": taken_out(answer.turn.observation, images), "seconds": round(answer.seconds, 6)}
            for answer in episode.answers
        ],
        "calls": [vars(call) | {"seconds": round(call.seconds, 6)} for call in episode.calls],
        "nodes": [
            {
                "parent": None if node.parent is None else numbers[id(node.parent)],
                "messages": taken_out(node.messages, images),
                "tokens": node.tokens,
                "said": None if node.said is None else _facts(node.said),
            }
            for node in episode.trace.nodes
        ],
        "cause": episode.cause,
        "error": episode.error,
        "failures": [one._asdict() for one in episode.failures],
        "is_cut": episode.is_cut,
        "info": episode.info,
        "seconds": {name: round(value, 6) for name, value in episode.seconds.items()},
    }
    return cast("dict[str, Json]", line | ({"images": [*images]} if images else {}))


def text_of(line: Line) -> str:
    """A line as JSON; what an environment returned that JSON cannot hold, is there as Python prints it."""
    return json.dumps(line, separators=(",", ":"), default=repr, skipkeys=True)


def episode_of(line: Line) -> Episode:
    """The episode of a line that was read from a journal.

    Raises:
        ValueError: The line is not one of a journal.
    """
    known, trace, answers = cast("Mapping[str, Any]", line), Trace(), []
    images = known.get("images", [])
    try:
        for one in known["nodes"]:
            parent = None if one["parent"] is None else trace.nodes[one["parent"]]
            said = None if one["said"] is None else Said(**one["said"])
            trace.add(parent, one["tokens"], cast("list[Message]", put_back(one["messages"], images)), said)
        for one in known["answers"]:
            turn = {name: value for name, value in one.items() if name != "seconds"}
            turn["observation"] = put_back(turn.get("observation", ""), images)
            answers.append(RecordedAnswer(Turn(**turn), float(one["seconds"])))
        return Episode(
            trace=trace,
            agents=tuple(map(str, known["agents"])),
            cause=_EARLIER.get(known["cause"], known["cause"]),
            error=str(known["error"]),
            is_cut=bool(known["is_cut"]),
            attempts=1 + int(known["attempt"]),
            seconds=dict(known["seconds"]),
            calls=[CallResult(**one) for one in known["calls"]],
            info=dict(known["info"]),
            answers=answers,
            failures=[FailureNote(**one) for one in known.get("failures", [])],
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"episode {line.get('id')} of the journal is damaged ({error!r})") from error


def _facts(said: Said) -> dict[str, Json]:
    # A dataclass is walked by hand: `asdict` would copy each number of the lists.
    facts = {name: value for name, value in vars(said).items() if name not in {"log_probs", "experts", "support"}}
    # The same float32 numbers with no more digits than they need.
    log_probs: Json = np.asarray(said.log_probs, np.float32).astype("U16").astype(np.float64).tolist()
    return {"log_probs": log_probs, **facts}


DIFFERENT = cast("FailureKind", "different")  # no kind of a run's failures
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
    known, new = (cast("Line", json.loads(text_of(line))) for line in (expected, found))  # as read from a file
    return next((_shown(place, one, other) for place, one, other in _pairs(known, new) if one != other), None)


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
