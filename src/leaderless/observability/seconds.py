"""The metrics that say where the time of a pool of ranks goes, added up over a run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from leaderless.observability.clock import STATES

PREFIX = "seconds/"
"""Beginning of the names of these metrics: `seconds/0-3/generate` is about ranks 0 to 3."""


def seconds_name(pool: str, state: str) -> str:
    """Name of the metric of a state of a pool."""
    return f"{PREFIX}{pool}/{state}"


def by_pool(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of such metrics by pool and state; states in their usual order."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        pool, _, state = name.removeprefix(PREFIX).partition("/")
        if name.startswith(PREFIX) and state in STATES:
            found.setdefault(pool, {})[state] = name
    return {pool: {state: states[state] for state in STATES if state in states} for pool, states in found.items()}


def total_seconds(rows: Iterable[Mapping[str, object]]) -> dict[str, dict[str, float]]:
    """Seconds of a whole run by pool and state, from the lines of its logs."""
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(PREFIX) and isinstance(value, int | float):
                totals[name] = totals.get(name, 0.0) + value
    return {pool: {state: totals[name] for state, name in states.items()} for pool, states in by_pool(totals).items()}


def in_short(seconds: Mapping[str, float]) -> str:
    """Shares of the time of a pool as a short line, the largest first; those below one percent are left out."""
    whole = sum(seconds.values()) or 1.0
    largest = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{state} {value / whole:.0%}" for state, value in largest if value >= 0.01 * whole)
