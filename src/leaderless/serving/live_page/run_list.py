"""The runs below some folders: the little that a list shows of each, and what its ranks do now."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import yaml

from leaderless.observability.clock import seconds_left
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
        tags: Setting `run.tags`.
        accuracy: Newest held-out accuracy, and its step; None if there is none.
        left_s: Seconds until the last step; None if they are not known.
    """

    key: str
    path: Path
    state: str
    step: int | None
    num_steps: int | None
    changed_s: float
    numbers: Mapping[str, float]
    tags: tuple[str, ...] = ()
    accuracy: tuple[float, int] | None = None
    left_s: float | None = None


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
            records, recipe = last_records(metrics) if state else [], read_text(path / "config.yaml")
            record = records[0] if records else {}
            numbers = {name: number for name, value in record.items() if (number := as_number(value)) is not None}
            changed = state or _stat(path / "config.yaml")
            changed_s = changed.st_mtime if changed else 0.0
            step, num_steps = as_step(record.get("step")), _setting("steps", recipe)
            facts = _tags(recipe), _accuracy(path), _seconds_left(records, num_steps, recipe)
            line = RunLine(key, path, "", step, num_steps, changed_s, numbers, *facts)
            self._lines[key] = known = (stamp, line)
        line = replace(known[1], state=state_of(known[1]))
        return line if line.state == "running" else replace(line, left_s=None)


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


def last_records(path: Path) -> list[Mapping[str, object]]:
    """The last complete JSON objects of a file of lines, the newest first; empty if there is none to be read."""
    records: list[Mapping[str, object]] = []
    try:
        file = path.open("rb")
    except OSError:  # it belongs to somebody else, or is gone
        return records
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
                    records.append(record)
            if records or length >= size:
                break
    return records


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


def _setting(name: str, recipe: str) -> int | None:
    """A whole number of a resolved recipe, by its name at the beginning of a line."""
    found = re.search(rf"(?m)^{name}:\s*(\d+)\s*$", recipe)
    return int(found[1]) if found else None


def _tags(recipe: str) -> tuple[str, ...]:
    found = re.search(r"(?m)^  tags:((?:\n  - .*)+)", recipe)
    try:
        tags = yaml.safe_load(found[1]) if found else ()
    except yaml.YAMLError:
        tags = ()
    return tuple(map(str, tags))


def _accuracy(path: Path) -> tuple[float, int] | None:
    """The newest held-out accuracy in the logs of a run, and its step."""
    found: list[tuple[int, float]] = []
    for log in path.glob("metrics*.jsonl"):
        try:
            with log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * TAIL_BYTES))
                text = file.read().rpartition(b"\n")[0]  # whole lines
            at = max(text.rfind(b'"evaluation/mean@'), text.rfind(b'"evaluation/accuracy"'))
            record = json.loads(text[text.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]) if at >= 0 else {}
        except (OSError, ValueError, RecursionError):
            continue
        step = as_step(as_mapping(record).get("step"))
        for name, value in as_mapping(record).items():
            number = as_number(value) if name.startswith(("evaluation/mean@", "evaluation/accuracy")) else None
            if step is not None and number is not None:
                found.append((step, number))
    return max(found)[::-1] if found else None


def _seconds_left(records: Sequence[Mapping[str, object]], num_steps: int | None, recipe: str) -> float | None:
    """Seconds that the steps after the newest record take if they are like those before it."""
    every = re.search(r"(?m)^evaluation:(?:\n  .*)*?\n  every_steps: (\d+)", recipe)
    known = [tuple(as_number(one.get(name)) for name in ("step", "time_s", "time/evaluate")) for one in records]
    took = [
        seconds - earlier_s - (evaluation_s or 0.0)
        for (step, seconds, evaluation_s), (before, earlier_s, _) in pairwise(known)
        if step and seconds is not None and earlier_s is not None and before == step - 1 > 0  # the first one warms up
    ]
    if not took or num_steps is None:
        return None
    step, evaluation_s = int(known[0][0] or 0), next((one[2] for one in known if one[2] is not None), 0.0)
    return max(0.0, seconds_left(median(took), step, num_steps, int(every[1]) if every else 0, evaluation_s or 0.0))


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
