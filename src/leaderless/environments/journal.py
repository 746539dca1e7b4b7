"""Episodes as lines of a journal, from which they can be played again without model or environment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from leaderless.base.values import Json
from leaderless.environments.answer_recorder import RecordedAnswer
from leaderless.environments.episode import Episode
from leaderless.environments.episode_trace import Said, Trace
from leaderless.environments.pictures import put_back, taken_out
from leaderless.environments.protocol import Message, Turn
from leaderless.environments.tools import CallResult

Line = Mapping[str, Json]
"""A line of the journal."""


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
    try:
        return _episode_of(cast("Mapping[str, list[Json]]", line))
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"episode {line.get('id')} of the journal is damaged ({error!r})") from error


def _episode_of(line: Mapping[str, list[Json]]) -> Episode:
    trace, images = Trace(), line.get("images", [])
    for one in cast("list[Mapping[str, list[int]]]", line["nodes"]):
        parent, said = cast("int | None", one["parent"]), cast("Mapping[str, Json] | None", one["said"])
        trace.add(
            None if parent is None else trace.nodes[parent],
            one["tokens"],
            cast("list[Message]", put_back(one["messages"], images)),
            None if said is None else Said(**said),  # type: ignore[arg-type]
        )
    return Episode(
        trace=trace,
        agents=tuple(map(str, line["agents"])),
        cause=str(line["cause"]),
        error=str(line["error"]),
        is_cut=bool(line["is_cut"]),
        attempts=1 + int(str(line["attempt"])),
        seconds=dict(cast("Mapping[str, float]", line["seconds"])),
        calls=[CallResult(**one) for one in cast("list[dict[str, Any]]", line["calls"])],
        info=dict(cast("Mapping[str, Json]", line["info"])),
        answers=[_answer_of(dict(one), images) for one in cast("list[Mapping[str, Json]]", line["answers"])],
    )


def _answer_of(fields: dict[str, Json], images: Sequence[Json]) -> RecordedAnswer:
    seconds = float(str(fields.pop("seconds")))
    fields["observation"] = put_back(fields.get("observation", ""), images)
    return RecordedAnswer(Turn(**fields), seconds)  # type: ignore[arg-type]


def _facts(said: Said) -> dict[str, Json]:
    # A dataclass is walked by hand: `asdict` would copy each number of the lists.
    facts = {name: value for name, value in vars(said).items() if name not in {"log_probs", "experts"}}
    return {"log_probs": _short(said.log_probs), **facts}


def _short(values: Sequence[float]) -> list[Json]:
    """The same float32 numbers with no more digits than they need."""
    numbers: list[Json] = np.asarray(values, np.float32).astype("U16").astype(np.float64).tolist()
    return numbers
