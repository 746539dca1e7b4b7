"""Tables of recorded samples and of episodes, from the files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from leaderless.observability.episode_files import read_episode_file
from leaderless.observability.loggers.protocol import Cell, LoggedTable
from leaderless.observability.report.episodes import conversation
from leaderless.observability.report.unchecked_values import as_list, as_mapping, as_number, as_text

MAX_ROWS = 256
"""Number of rows of a table; the files of the run have all."""
MAX_CHARACTERS = 20_000
"""Length at which a text is cut."""
PREFIXES = {"step": "", "evaluation": "evaluation/"}
"""Beginning of the names of tables, by the kind of step."""


def tables_of(directory: Path, kind: str, step: int) -> Iterator[LoggedTable]:
    """The tables of a step, or of the evaluation after it, as far as the run has recorded them."""
    for name, rows in (("samples", _samples(directory, kind, step)), ("episodes", _episodes(directory, kind, step))):
        found = list(rows)
        if found:
            columns = list(dict.fromkeys(column for row in found for column in row))
            cells = [[row.get(column) for column in columns] for row in found]
            yield LoggedTable(PREFIXES[kind] + name, step, columns, cells)


def _samples(directory: Path, kind: str, step: int) -> Iterator[Mapping[str, Cell]]:
    room = MAX_ROWS
    for path in sorted((directory / "samples").glob(f"{kind}-{step:06d}.rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")[:room]:
            try:
                row = as_mapping(json.loads(line))
            except ValueError:
                continue
            room -= 1
            yield {
                "prompt": _clip(as_text(row.get("prompt"))),
                "response": _clip(as_text(row.get("response"))),
                "answer": _clip(as_text(row.get("answer"))),
                "reward": as_number(row.get("reward")),
                "advantage": as_number(row.get("advantage")),
                "is_valid": row.get("is_valid") is not False,
                "is_truncated": row.get("is_truncated") is True,
                "role": as_text(row.get("role")),
            } | {
                f"reward/{name}": as_number(as_mapping(detail).get("value"))
                for name, detail in as_mapping(row.get("details")).items()
            }


def _episodes(directory: Path, kind: str, step: int) -> Iterator[Mapping[str, Cell]]:
    folder = directory / "episodes" / f"{kind}-{step:06d}"
    rewards: dict[str, list[float]] = {}  # one for each agent
    for path in sorted(folder.glob("graded.rank-*.jsonl.gz")):
        for line in _lines(path):
            rewards.setdefault(as_text(line.get("id")), []).append(as_number(line.get("reward")) or 0.0)
    room = MAX_ROWS
    for path in sorted(folder.glob("played.rank-*.jsonl.gz")):
        for line in _lines(path):
            if not room:
                return
            room -= 1
            number = as_text(line.get("id"))
            talk = conversation(line)
            messages = [as_mapping(message) for message in as_list(talk["messages"])]
            said = [message for message in messages if message.get("kind") == "said"]
            own = [as_number(message.get("reward")) or 0.0 for message in said]
            yield {
                "episode": number,
                "agents": ", ".join(map(as_text, as_list(talk["agents"]))),
                "end": as_text(talk["cause"]),
                "error": _clip(as_text(talk["error"])),
                "turns": len(said),
                "tokens": sum(int(as_number(message.get("tokens")) or 0) for message in said),
                "reward of turns": sum(own),
                "reward": fmean(rewards[number]) if number in rewards else None,
                "conversation": _clip("\n\n".join(f"{one.get('who')}: {one.get('text')}" for one in messages)),
            }


def _lines(path: Path) -> Sequence[Mapping[str, object]]:
    """The lines of a file of episodes; none if it is damaged, or about to be removed by a run."""
    try:
        return list(read_episode_file(path))
    except ValueError:
        return ()


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"
