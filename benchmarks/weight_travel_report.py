"""What new weights on a slow link may cost, and the runs that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/weight_travel.json"
GENERATION_S, TRAINING_S, TRAVEL_S = 1.5, 1.0, 0.4
"""Seconds of an iteration of each pool, and of the weights that it leaves on their way."""
WARM_UP = 3
"""First iterations that are left out."""


class Run(TypedDict):
    """One run.

    Attributes:
        lag: Iterations that may be in flight; 0 in lockstep.
        promised_s: Seconds of an iteration that arithmetic promises.
        measured_s: Those that were measured.
        share: Part of them in which the pool that generates waited for weights or took them.
    """

    lag: int
    promised_s: float
    measured_s: float
    share: float


class Results(TypedDict):
    """All runs."""

    iterations: int
    runs: list[Run]


def promised_s(lag: int) -> float:
    """Seconds of an iteration in the long run, if weights travel while both pools work.

    From rows to the weights that they leave, and on to the rows of `lag + 1` iterations later, everything follows.
    """
    return max(GENERATION_S, TRAINING_S, TRAVEL_S, (GENERATION_S + TRAINING_S + TRAVEL_S) / (lag + 1))


def conditions(results: Results) -> str:
    """The known times, for readers."""
    times = f"*G* = {GENERATION_S:g} s, *T* = {TRAINING_S:g} s, *W* = {TRAVEL_S:g} s"
    return f"{times}; {results['iterations']} iterations, without the first {WARM_UP}."


def table(results: Results) -> str:
    """A row for each run, in Markdown."""
    lines = [
        "| lag | promised, s | measured, s | share of waiting for weights and taking them |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for run in results["runs"]:
        lag = run["lag"] or "lockstep"
        lines.append(f"| {lag} | {run['promised_s']:.2f} | {run['measured_s']:.2f} | {run['share']:.2%} |")
    return "\n".join(lines)


def load(results: Path = RESULTS) -> Results | None:
    """Results of an earlier run of the script; None if there are none."""
    if not results.exists():
        return None
    found: Results = json.loads(results.read_text(encoding="utf-8"))
    return found
