"""Reads the traces of a run's ranks while they grow: what happened, and in which step. Imports no tracker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from leaderless.observability.clock import HOST
from leaderless.observability.line_file import parse_line
from leaderless.observability.report.unchecked_values import as_mapping, as_number, as_text

STEPS_OPEN = 2
"""Number of steps after which a step is over: transfers on other threads may end in the one after theirs."""
_END = b'{"name": "process_name"'


@dataclass
class OpenStep:
    """A step of a rank, of which more may follow: its key among all, and its time from 1970 in nanoseconds."""

    key: str
    begin_ns: int
    end_ns: int


@dataclass
class TracePosition:
    """A place in the trace of a rank, up to which it has been read.

    Attributes:
        offset: Bytes from the beginning to the end of the last event that was read.
        host: Machine of the rank.
        steps: Steps that are open there, by number.
    """

    offset: int = 0
    host: str = ""
    steps: dict[int, OpenStep] = field(default_factory=dict)


class TracedSpan(NamedTuple):
    """Something that a rank did.

    Attributes:
        rank: Number of the rank.
        host: Machine of the rank; empty if its trace does not name it.
        name: Name, such as that of a node; `step N` for a whole step.
        key: Key of a whole step, among all steps of all ranks; empty for its parts.
        step_key: Key of the step that it is a part of; empty for a whole step.
        step: Number of the step.
        begin_ns: Beginning, in nanoseconds since 1970.
        end_ns: End, in nanoseconds since 1970.
        facts: Further facts, such as numbers of rows and tokens.
    """

    rank: int
    host: str
    name: str
    key: str
    step_key: str
    step: int
    begin_ns: int
    end_ns: int
    facts: Mapping[str, object]


class TraceFollower:
    """Reads the trace of one rank from a position on.

    A rank that starts again writes its trace anew, but its earlier events come first, with the same bytes.
    """

    def __init__(self, path: Path, position: TracePosition) -> None:
        (number,) = re.findall(r"\d+", path.stem)
        self._path, self.rank, self.position = path, int(number), position

    def new_spans(self, most: int) -> list[TracedSpan]:
        """Read on; returns about this many spans at most, or none where there are no more.

        The position is then behind them.
        """
        spans: list[TracedSpan] = []
        for line in self._new_lines():
            self.position.offset += len(line)
            event = as_mapping(parse_line(line.rstrip(b",\n")))
            if event.get("name") == HOST:
                spans += self.close()
                self.position.host = as_text(as_mapping(event.get("args")).get("labels"))
            elif event.get("ph") == "X":
                spans += self._take(event)
            if len(spans) >= most:
                break
        return spans

    def close(self, before: int | None = None) -> list[TracedSpan]:
        """The steps that are open, all or those before a step, which nothing follows."""
        over = [step for step in self.position.steps if before is None or step < before]
        return [self._whole(step, self.position.steps.pop(step)) for step in sorted(over)]

    def _take(self, event: Mapping[str, object]) -> list[TracedSpan]:
        """A span, after the steps that are over because of it."""
        facts = dict(as_mapping(event.get("args")))
        step, lane = (int(as_number(value) or 0) for value in (facts.pop("step", 0), event.get("tid")))
        begin_us, us = (as_number(event.get(name)) or 0.0 for name in ("ts", "dur"))
        begin_ns, end_ns = round(begin_us * 1000), round((begin_us + us) * 1000)
        over = self.close(step - STEPS_OPEN + 1) if lane == 0 else []
        found = self.position.steps.setdefault(step, OpenStep(f"{self.rank}/{step}/{begin_ns}", begin_ns, end_ns))
        found.begin_ns, found.end_ns = min(found.begin_ns, begin_ns), max(found.end_ns, end_ns)
        facts |= {"lane": lane} if lane else {}
        name, host = as_text(event.get("name")), self.position.host
        return [*over, TracedSpan(self.rank, host, name, "", found.key, step, begin_ns, end_ns, facts)]

    def _whole(self, step: int, found: OpenStep) -> TracedSpan:
        times = found.begin_ns, found.end_ns
        return TracedSpan(self.rank, self.position.host, f"step {step}", found.key, "", step, *times, {})

    def _new_lines(self) -> Iterator[bytes]:
        """Complete lines with events, which stay where they are when the trace is written anew."""
        try:
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self.position.offset)
            for line in file:
                if not line.endswith(b"\n") or line.startswith((b"]", _END)):
                    return  # the rest of a line comes later, and the end of a trace is no part of a longer one
                yield line
