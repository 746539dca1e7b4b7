"""The results of `continuous_placement.py` as text."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import TypedDict

EVERYWHERE = "all ranks do both"
"""Name of the layout without pools."""
RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/continuous_placement.json"


class Measured(TypedDict):
    """Seconds of a step, and what was predicted."""

    seconds: float
    predicted: float


class Case(TypedDict):
    """The fastest layouts of each kind of a workload on some workers, by name; the chosen one is among them."""

    workload: str
    workers: int
    chosen: str
    runs: dict[str, Measured]


class Results(TypedDict):
    """All cases, and where they were measured."""

    cores: int
    steps: int
    cases: list[Case]


def load(results: Path = RESULTS) -> Results | None:
    """Results of an earlier run of the benchmark; None if there are none."""
    if not results.exists():
        return None
    found: Results = json.loads(results.read_text(encoding="utf-8"))
    return found


def prediction_error(run: Measured) -> float:
    """How far the predicted step is from the measured one, as a share."""
    return abs(run["predicted"] / run["seconds"] - 1)


def summary(results: Results) -> str:
    """Errors of predictions, and what the choice gains."""
    if not results["cases"]:
        return "No case has been measured."
    runs = [run for case in results["cases"] for run in case["runs"].values()]
    continuous = [run for case in results["cases"] for name, run in case["runs"].items() if "continuous" in name]
    chosen = [case["runs"][case["chosen"]] for case in results["cases"]]
    gains = [
        case["runs"][EVERYWHERE]["seconds"] / case["runs"][case["chosen"]]["seconds"]
        for case in results["cases"]
        if EVERYWHERE in case["runs"]
    ]
    regrets = [
        case["runs"][case["chosen"]]["seconds"] / min(run["seconds"] for run in case["runs"].values()) - 1
        for case in results["cases"]
    ]
    errors = [f"{median(map(prediction_error, some)):.0%}" for some in (chosen, continuous, runs)]
    return (
        f"{len(results['cases'])} cases with {len(runs)} layouts, {results['cores']} cores, {results['steps']} steps "
        f"each: the predicted step of the chosen layout is off by {errors[0]}, that of layouts that generate "
        f"continuously by {errors[1]}, and that of any by {errors[2]} (medians). The chosen layout is {min(gains):.2f} "
        f"to {max(gains):.2f} times as fast as all ranks in lockstep (median {median(gains):.2f}), and at most "
        f"{max(regrets):.0%} slower than the fastest of those that were run."
    )


def table(results: Results) -> str:
    """A row for each layout, in Markdown; the chosen one is in bold."""
    lines = [
        "| workload | workers | layout | predicted, s | measured, s | off by |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for case in results["cases"]:
        for name, run in case["runs"].items():
            shown = f"**{name}**" if name == case["chosen"] else name
            lines.append(
                f"| {case['workload']} | {case['workers']} | {shown} | {run['predicted']:.2f} | {run['seconds']:.2f} "
                f"| {run['predicted'] / run['seconds'] - 1:+.0%} |"
            )
    return "\n".join(lines)
