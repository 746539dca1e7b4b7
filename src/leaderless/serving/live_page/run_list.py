"""The runs below some folders: the little that a list shows of each, and what its ranks do now."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from leaderless.observability.line_file import GrowingFile
from leaderless.observability.report.unchecked_values import as_mapping, as_number, as_step, as_text
from leaderless.observability.report.view import format_bytes, format_duration
from leaderless.planner.layout import format_ranks

TAIL_BYTES = 16_384
"""Bytes at the end of a file that the list reads; a line of metrics is much shorter."""
MAX_DEPTH = 3
"""Depth below a folder at which runs are looked for."""
LOOK_EVERY_S = 2.0
"""Shortest time between two looks at which runs there are."""
GONE_S = 30.0
"""Time without a sign of life, on top of that between two, after which a rank counts as gone."""
_INNER = re.compile(r"checkpoints|doors|episodes|errors|journal|live|loggers|logs|samples|tensorboard|trace|\..*")
"""Names of folders in which there are no runs."""


@dataclass(frozen=True)
class RunLine:
    """A run in the list.

    Attributes:
        key: Name in addresses: its path below the folder that was given.
        path: Folder of the run.
        state: `running`, `gone` (its ranks have written nothing for too long), `done`, `stopped` or `empty`.
        step: Last step that was logged; None if there is none.
        num_steps: Steps of the recipe; None if they are not known.
        changed_s: Time of the last change, in seconds since 1970.
        numbers: Numbers of the last step.
    """

    key: str
    path: Path
    state: str
    step: int | None
    num_steps: int | None
    changed_s: float
    numbers: Mapping[str, float]


class RunIndex:
    """All runs below some folders. Files that have not changed are not read again."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Read nothing yet; a root may be a run itself, or hold runs."""
        self._roots = roots
        self._paths: dict[str, Path] = {}
        self._looked_s = -LOOK_EVERY_S
        self._lines: dict[str, tuple[tuple[int, int], RunLine]] = {}

    def paths(self) -> Mapping[str, Path]:
        """The folders of all runs, by key."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_EVERY_S:
            found: dict[str, Path] = {}
            for root in self._roots:
                for path in _runs_below(root, MAX_DEPTH):
                    key = path.name if path == root else path.relative_to(root).as_posix()
                    while key in found:
                        key = f"{root.name}/{key}"
                    found[key] = path
            self._paths, self._looked_s = found, time.monotonic()
        return self._paths

    def lines(self) -> list[RunLine]:
        """All runs, the one that changed last first."""
        return sorted((self.line(key, path) for key, path in self.paths().items()), key=lambda line: -line.changed_s)

    def line(self, key: str, path: Path) -> RunLine:
        """Entry of a run in the list."""
        metrics = path / "metrics.jsonl"
        state = _stat(metrics)
        stamp = (state.st_mtime_ns, state.st_size) if state else (0, 0)
        known = self._lines.get(key)
        if known is None or known[0] != stamp:
            record = last_record(metrics) if state else {}
            numbers = {name: number for name, value in record.items() if (number := as_number(value)) is not None}
            changed = state or _stat(path / "config.yaml")
            changed_s = changed.st_mtime if changed else 0.0
            line = RunLine(key, path, "", as_step(record.get("step")), _num_steps(path), changed_s, numbers)
            self._lines[key] = known = (stamp, line)
        return replace(known[1], state=state_of(known[1]))


def state_of(line: RunLine) -> str:
    """State of a run, by its files."""
    if ranks := statuses(line.path):
        return "gone" if all(map(is_gone, ranks)) else "running"
    if line.step is None:
        return "empty"
    return "done" if line.num_steps is not None and line.step >= line.num_steps else "stopped"


def is_gone(status: Mapping[str, object]) -> bool:
    """Whether a rank has given no sign of life for too long."""
    return (as_number(status.get("age_s")) or 0.0) > GONE_S + 3 * (as_number(status.get("every_s")) or 0.0)


def statuses(path: Path) -> list[Mapping[str, object]]:
    """Last report of each rank of a run, by rank, with its age."""
    found: list[Mapping[str, object]] = []
    folder = path / "live"
    try:
        names = sorted((entry.name for entry in os.scandir(folder)), key=lambda name: (len(name), name))
    except OSError:
        return []
    for name in names:
        if not re.fullmatch(r"rank-\d+\.json", name):
            continue
        try:
            status = as_mapping(json.loads((folder / name).read_text(encoding="utf-8", errors="replace")))
            # By the clock of the shared folder, as the clocks of two machines differ.
            age_s = max(0.0, time.time() - (folder / name).stat().st_mtime)
        except (OSError, ValueError):
            continue
        if as_step(status.get("rank")) is not None:
            found.append({**status, "age_s": age_s})
    return found


def last_record(path: Path) -> Mapping[str, object]:
    """The last complete JSON object of a file of lines, read from its end; empty if there is none to be read."""
    try:
        file = path.open("rb")
    except OSError:  # it belongs to somebody else, or is gone
        return {}
    with file:
        size = file.seek(0, os.SEEK_END)
        for length in (TAIL_BYTES, 64 * TAIL_BYTES):
            file.seek(max(0, size - length))
            lines = file.read(length).split(b"\n")[:-1]
            for line in reversed(lines if length >= size else lines[1:]):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    return record
            if length >= size:
                break
    return {}


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Folders of runs; links are not followed, as they may lead anywhere."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    names = {entry.name for entry in entries}
    if names & {"config.yaml", "metrics.jsonl"} and names & {"plan.json", "metrics.jsonl", "live", "checkpoints"}:
        yield folder
        return
    for entry in sorted(entries, key=lambda entry: entry.name) if depth else ():
        if entry.is_dir(follow_symlinks=False) and not _INNER.fullmatch(entry.name):
            yield from _runs_below(Path(entry.path), depth - 1)


def _num_steps(path: Path) -> int | None:
    """The setting `steps` of a resolved recipe, which stands at the beginning of a line."""
    found = re.search(r"(?m)^steps:\s*(\d+)\s*$", read_text(path / "config.yaml"))
    return int(found[1]) if found else None


def read_text(path: Path) -> str:
    """The text of a file of a run; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


MAX_RANKS = 64
"""Number of ranks in the table."""
MAX_EVENTS = 20
"""Number of newest events in the table."""
MAX_DETAILS = 400
"""Length at which the details of an event are cut."""


class EventList:
    """The newest events of a run, read as its file grows."""

    def __init__(self, directory: Path) -> None:
        self._file = GrowingFile(directory / "events.jsonl")
        self._rows: list[tuple[str, str, str]] = []

    def newest(self) -> Sequence[tuple[str, str, str]]:
        """Time, kind and details of the newest events, the newest first."""
        for line in self._file.new_lines():
            kind, moment = as_text(line.record.get("event")), as_text(line.record.get("time"))[:19].replace("T", " ")
            facts = {name: value for name, value in line.record.items() if name not in {"event", "time"}}
            details = ", ".join(f"{name}: {as_text(value)}" for name, value in facts.items() if value not in (None, ""))
            self._rows.append((moment, kind, details[:MAX_DETAILS]))
            del self._rows[:-MAX_EVENTS]
        return self._rows[::-1]


def now_values(line: RunLine, events: EventList) -> Mapping[str, object]:
    """Values for the template of the current activity."""
    ranks = statuses(line.path)
    ago = max(0.0, time.time() - line.changed_s) if line.step is not None else None
    return {
        "state": line.state,
        "step": line.step,
        "num_steps": line.num_steps,
        "ago": None if ago is None else format_duration(round(ago)),
        "is_asked": (line.path / "stop").exists() and line.state == "running",
        "ranks": [_row(status) for status in ranks[:MAX_RANKS]],
        "num_more": max(0, len(ranks) - MAX_RANKS),
        "events": events.newest(),
    }


def doing(path: Path) -> Mapping[str, str]:
    """The ranks at each node, as text."""
    ranks: dict[str, list[int]] = {}
    for status in statuses(path):
        rank = as_step(status.get("rank"))
        if rank is not None and not is_gone(status):
            ranks.setdefault(as_text(status.get("doing")), []).append(rank)
    return {node: format_ranks(tuple(sorted(own))) for node, own in ranks.items()}


def _row(status: Mapping[str, object]) -> Sequence[str]:
    idle, age, cpu, device = (
        as_number(status.get(name)) for name in ("idle_s", "age_s", "cpu_percent", "device_percent")
    )
    used, total = status.get("device_bytes"), status.get("device_total_bytes")
    seen = format_duration(round(age or 0.0))
    return (
        as_text(status.get("rank")),
        as_text(status.get("host")),
        as_text(as_step(status.get("step"))),
        as_text(status.get("doing")),
        as_text(status.get("waiting_for")) or "–",
        "–" if idle is None else format_duration(round(idle, 1)),
        format_bytes(status.get("host_bytes")),
        "–" if cpu is None else f"{cpu:.0f}%",
        "–" if device is None else f"{device:.0f}%",
        "–" if used is None else f"{format_bytes(used)} of {format_bytes(total)}",
        f"gone, {seen} ago" if is_gone(status) else f"{seen} ago",
    )
