"""The seconds that a fixed lag promises, and the runs that were measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TypedDict

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/fixed_lag.json"
MEAN_S = 1.5
"""Mean seconds of generating, and of training, in an iteration."""


class Times(TypedDict):
    """Seconds of each iteration."""

    generation: list[float]
    training: list[float]


class Run(TypedDict):
    """One run.

    Attributes:
        ranks: Ranks that generate, and as many others that train.
        times: Name of the times of the iterations.
        lag: Iterations that may be in flight; 0 in lockstep.
        promised_s: Seconds that arithmetic promises.
        measured_s: Seconds from the first iteration's begin to the last one's end.
    """

    ranks: int
    times: str
    lag: int
    promised_s: float
    measured_s: float


class Results(TypedDict):
    """All runs, and where they were made."""

    cores: int
    iterations: int
    runs: list[Run]


def constant_times(iterations: int) -> Times:
    """Generating takes as long as training, always."""
    return Times(generation=[MEAN_S] * iterations, training=[MEAN_S] * iterations)


def drawn_times(iterations: int) -> Times:
    """Both take between a third and five thirds of their mean, drawn once and for all."""
    generator = random.Random(0)

    def drawn() -> list[float]:
        return [round(generator.uniform(MEAN_S / 3, 5 * MEAN_S / 3), 3) for _ in range(iterations)]

    return Times(generation=drawn(), training=drawn())


def promised_seconds(times: Times, lag: int) -> float:
    """Seconds until the last iteration is trained, if nothing but generating and training took any time.

    Iteration `k` is generated with the weights that training left at iteration `k - 1 - lag`, and trained when it is
    generated; no pool does two iterations at the same time. In lockstep, with a lag of 0, this is the sum of all.
    """
    generated, trained = 0.0, list[float]()
    for k, (generation, training) in enumerate(zip(times["generation"], times["training"], strict=True)):
        weights = trained[k - 1 - lag] if k > lag else 0.0
        generated = max(generated, weights) + generation
        trained.append(max(trained[-1] if trained else 0.0, generated) + training)
    return trained[-1]


def table(results: Results) -> str:
    """A row for each run, in Markdown."""
    lines = [
        "| ranks | times | lag | promised, s | measured, s | measured / promised | as fast as lockstep |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lockstep = {(run["ranks"], run["times"]): run["measured_s"] for run in results["runs"] if not run["lag"]}
    for run in results["runs"]:
        promised, measured = run["promised_s"], run["measured_s"]
        base = lockstep.get((run["ranks"], run["times"]))
        speedup = f"{base / measured:.2f} ×" if base else ""
        lines.append(
            f"| {run['ranks']} + {run['ranks']} | {run['times']} | {run['lag'] or 'lockstep'} | {promised:.2f} "
            f"| {measured:.2f} | {measured / promised:.3f} | {speedup} |"
        )
    return "\n".join(lines)


def load(results: Path = RESULTS) -> Results | None:
    """Results of an earlier run of this script; None if there are none."""
    if not results.exists():
        return None
    found: Results = json.loads(results.read_text(encoding="utf-8"))
    return found
