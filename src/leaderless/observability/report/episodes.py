"""Recorded episodes as conversations, as the page shows them. The journal may hold anything."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from leaderless.base.image_files import read_image, thumbnail
from leaderless.observability.report.unchecked_values import (
    as_list,
    as_mapping,
    as_number,
    as_step,
    as_text,
    embedded_json,
    parse_json,
)

if TYPE_CHECKING:
    from leaderless.observability.report.samples import RecordedStep

EPISODE_BUDGET_BYTES = 3_000_000
"""Largest size of all conversations of one kind on a page."""
READ_BUDGET_BYTES = 200_000_000
"""Largest size of the compressed files that are read for them."""
MAX_MESSAGE_CHARACTERS = 6_000
"""Length at which a message is cut."""
MAX_MESSAGES = 200
"""Number of messages of an episode that are shown."""

Conversation = Mapping[str, object]
"""An episode: its `messages`, `agents`, how it ended, whether it has drifted, and its `seconds`."""
_FOLDER = re.compile(r"(step|evaluation)-(\d+)")
_ID = re.compile(r'\{"id":(\d+),')


class EpisodePages:
    """Conversations of a run, of steps or evaluations, read from the folder of its journal, which may be missing."""

    def __init__(self, folder: Path, kind: str) -> None:
        found = [(path, _FOLDER.fullmatch(path.name)) for path in (folder.iterdir() if folder.is_dir() else ())]
        self._folders = {int(match[2]): path for path, match in found if match and match[1] == kind and path.is_dir()}
        self._room = READ_BUDGET_BYTES
        self.problems: list[str] = []

    @property
    def steps(self) -> frozenset[int]:
        """The steps that have episodes."""
        return frozenset(self._folders)

    def of(self, steps: Sequence[RecordedStep]) -> list[tuple[RecordedStep, Mapping[str, Conversation]]]:
        """The conversations that the samples of steps are from; the first steps are left out first."""
        room, found = EPISODE_BUDGET_BYTES, list[tuple["RecordedStep", Mapping[str, Conversation]]]()
        for step in reversed(steps):
            wanted = {sample.episode for group in step.groups for sample in group.samples if sample.episode}
            some = self._read(step.step, wanted) if room > 0 else {}
            room -= len(embedded_json(some).encode("utf-8", "backslashreplace"))
            found.append((step, some if room >= 0 else {}))
        return found[::-1]

    def _read(self, step: int, wanted: set[str]) -> dict[str, Conversation]:
        """Episodes of a step by number. Samples that waited for a step are from the one before."""
        found: dict[str, Conversation] = {}
        for folder in (self._folders.get(step), self._folders.get(step - 1)):
            for path in sorted(folder.glob("played.rank-*.jsonl.gz")) if folder is not None else ():
                if found.keys() < wanted:
                    lines = self._in_file(path, wanted)
                    found |= {name: conversation(line) for name, line in lines if name not in found}
        return self._with_grading(step, found)

    def _with_grading(self, step: int, found: Mapping[str, Conversation]) -> dict[str, Conversation]:
        """The same conversations with the time that the recipe's rewards took."""
        spent: dict[str, float] = {}
        folder = self._folders.get(step)
        for path in sorted(folder.glob("graded.rank-*.jsonl.gz")) if folder is not None and found else ():
            for name, line in self._in_file(path, {*found}):
                spent[name] = spent.get(name, 0.0) + (as_number(line.get("seconds")) or 0.0)
        return {
            name: {**one, "seconds": {**as_mapping(one["seconds"]), "grading": spent.get(name, 0.0)}}
            for name, one in found.items()
        }

    def _in_file(self, path: Path, wanted: set[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
        self._room -= path.stat().st_size
        if self._room < 0:
            return
        try:
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    match = _ID.match(line)
                    if match and match[1] in wanted:
                        yield match[1], as_mapping(parse_json(line))
        except (OSError, EOFError, zlib.error, ValueError) as error:
            self.problems.append(f"episodes/{path.parent.name}/{path.name} cannot be read: {error}.")


def conversation(line: Mapping[str, object]) -> Conversation:
    """A line of the journal in the shape that the page relies on, whatever the line holds."""
    calls = iter([as_mapping(call) for call in as_list(line.get("calls"))])
    waits = iter([as_number(as_mapping(answer).get("seconds")) for answer in as_list(line.get("answers"))])
    next(waits, None)  # the beginning
    messages: list[Mapping[str, object]] = []
    pictures = as_list(line.get("images"))
    for node in map(as_mapping, as_list(line.get("nodes"))):
        said = node.get("said")
        for message in map(as_mapping, as_list(node.get("messages"))):
            if isinstance(said, dict):
                messages.append(_said(message, said, len(as_list(node.get("tokens"))), waits))
            else:
                messages.append(_told(message, calls, pictures))
    return {
        "agents": [as_text(agent) for agent in as_list(line.get("agents"))],
        "cause": as_text(line.get("cause")),
        "error": _clip(as_text(line.get("error"))),
        "is_cut": line.get("is_cut") is True,
        "has_drifted": line.get("has_drifted") is True,
        "seconds": dict(_numbers(line.get("seconds"))),
        "messages": messages[:MAX_MESSAGES],
        "total": len(messages),
    }


def _said(
    message: Mapping[str, object], said: Mapping[str, object], num_tokens: int, waits: Iterator[float | None]
) -> Mapping[str, object]:
    calls = [as_mapping(as_mapping(call).get("function")) for call in as_list(message.get("tool_calls"))]
    return {
        "kind": "said",
        "who": as_text(said.get("agent")),
        "text": _clip(as_text(message.get("content"))),
        "calls": [
            {"name": as_text(call.get("name")), "arguments": _clip(as_text(call.get("arguments")))} for call in calls
        ],
        "turn": as_step(said.get("turn")),
        "reward": as_number(said.get("reward")),
        "tokens": num_tokens,
        "is_truncated": said.get("is_truncated") is True,
        "seconds": None if calls else next(waits, None),
    }


def _told(
    message: Mapping[str, object], calls: Iterator[Mapping[str, object]], pictures: Sequence[object]
) -> Mapping[str, object]:
    role, content = as_text(message.get("role")), message.get("content")
    call = next(calls, {}) if role == "tool" else {}
    parts = list(map(as_mapping, as_list(content)))
    text = "".join(as_text(part.get("text")) for part in parts) if parts else as_text(content)
    return {
        "kind": role if role in {"system", "tool"} else "told",
        "who": as_text(call.get("name")) or role,
        "text": _clip(text),
        "images": [url for part in parts for url in _pictures(part, pictures)],
        "refusal": as_text(call.get("refusal")),
        "seconds": as_number(call.get("seconds")),
    }


def _pictures(part: Mapping[str, object], pictures: Sequence[object]) -> Iterator[str]:
    """The image of a part of a message, small; none if it is none, or damaged."""
    number = part.get("image")
    url = as_text(pictures[number]) if isinstance(number, int) and 0 <= number < len(pictures) else ""
    if url.startswith("data:"):
        with suppress(ValueError):
            yield thumbnail(read_image(url, Path()))


def _numbers(value: object) -> Iterator[tuple[str, float]]:
    for name, number in as_mapping(value).items():
        found = as_number(number)
        if found is not None:
            yield name, found


def _clip(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    return f"{text[:MAX_MESSAGE_CHARACTERS]}\n[… {len(text) - MAX_MESSAGE_CHARACTERS:,} more characters]"
