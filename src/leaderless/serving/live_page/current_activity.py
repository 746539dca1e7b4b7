"""Current activity of a run, for the top of its page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.observability.growing_file import GrowingFile
from leaderless.observability.report.unchecked_values import as_number, as_step, as_text
from leaderless.observability.report.view import format_bytes, format_duration
from leaderless.planner.layout import format_ranks
from leaderless.serving.live_page.run_list import RunLine, is_gone, statuses

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
