"""The workloads of `placement.py`, and its results as a table of regrets."""

from __future__ import annotations

import json
from math import exp, log
from pathlib import Path
from statistics import fmean, median
from typing import TypedDict

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/placement.json"


class Workload(TypedDict):
    """What is run.

    Attributes:
        work: Seconds that stages take; see `placement_parts.Work`.
        critic: Whether a critic is trained next to the policy.
        max_lag: Most iterations that generation may be ahead.
    """

    work: dict[str, float]
    critic: bool
    max_lag: int


def _workload(median: float, sigma: float, delay_s: float = 0.0, max_lag: int = 0, *, critic: bool = False) -> Workload:
    most = 96 if sigma > 1 else round(1.5 * median)
    train = {"train_fixed_s": 0.1, "train_token_s": 0.0008}
    work = {"median": median, "sigma": sigma, "most": most, "token_s": 0.004, "delay_s": delay_s, "places": 4}
    return Workload(work=work | train, critic=critic, max_lag=max_lag)


SHORT, LONG, TAIL = (12, 0.2), (48, 0.2), (16, 1.1)
WORKLOADS = {
    "short": _workload(*SHORT),
    "long": _workload(*LONG),
    "tail": _workload(*TAIL),
    "short_50ms": _workload(*SHORT, delay_s=0.05),
    "tail_50ms": _workload(*TAIL, delay_s=0.05),
    "short_500ms": _workload(*SHORT, delay_s=0.5),
    "short_lag": _workload(*SHORT, max_lag=1),
    "long_lag": _workload(*LONG, max_lag=1),
    "tail_lag": _workload(*TAIL, max_lag=1),
    "tail_500ms_lag": _workload(*TAIL, delay_s=0.5, max_lag=1),
    "short_critic": _workload(*SHORT, critic=True),
    "tail_50ms_critic": _workload(*TAIL, delay_s=0.05, critic=True),
}
"""Lengths, seconds until an environment answers, a critic or none, and whether generation may be ahead."""


class Measured(TypedDict):
    """Seconds of a step, and what was predicted."""

    seconds: float
    predicted: float


class Case(TypedDict):
    """All layouts of a workload on some workers, by name."""

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


def regret(case: Case, name: str | None = None) -> float:
    """How much longer a step takes than under the fastest layout, as a share; of the chosen layout by default."""
    best = min(run["seconds"] for run in case["runs"].values())
    return case["runs"][name or case["chosen"]]["seconds"] / best - 1


def prediction_error(run: Measured) -> float:
    """How far the predicted step is from the measured one, as a share."""
    return abs(run["predicted"] / run["seconds"] - 1)


def half_and_half(case: Case) -> str | None:
    """The layout in lockstep whose two pools have equally many ranks, or nearly."""
    half = case["workers"] // 2
    first = "0" if half == 1 else f"0-{half - 1}"
    found = [name for name in case["runs"] if name.startswith(f"rollout {first}, policy {half}")]
    found = [name for name in found if "lag" not in name and _shares_policy(name)]
    return found[0] if found else None


def _shares_policy(name: str) -> bool:
    """Whether the critic, if there is one, is where the policy is."""
    parts = dict(part.split(" ") for part in name.split(", "))
    return parts.get("critic", parts["policy"]) == parts["policy"]


def summary(results: Results) -> str:
    """Shares of cases within bounds, prediction errors, and seconds against two fixed layouts."""
    cases = results["cases"]
    if not cases:
        return "No case has been measured."
    regrets = [regret(case) for case in cases]
    within = sum(value <= 0.10 for value in regrets) / len(regrets)
    halves = [(case, name) for case in cases if (name := half_and_half(case))]
    colocated = exp(fmean(log((1 + regret(case, "colocated")) / (1 + regret(case))) for case in cases))
    half = exp(fmean(log((1 + regret(case, name)) / (1 + regret(case))) for case, name in halves)) if halves else 1.0
    runs = [run for case in cases for run in case["runs"].values()]
    chosen_error, error = (
        median(map(prediction_error, some)) for some in ([case["runs"][case["chosen"]] for case in cases], runs)
    )
    return (
        f"{len(cases)} cases with {len(runs)} layouts, {results['cores']} cores, {results['steps']} steps each: the "
        f"chosen layout is within 10 % of the fastest in {within:.0%} of the cases, and {max(regrets):.0%} slower at "
        f"worst. Its predicted step is off by {chosen_error:.0%}, that of any layout by {error:.0%} (medians). Against "
        f"it, all nodes on all ranks take {colocated:.2f} times as long, and two equal pools in lockstep {half:.2f} "
        "times (geometric means)."
    )


def table(results: Results) -> str:
    """A row for each case, in Markdown."""
    lines = [
        "| workload | workers | layouts | chosen | predicted, s | measured, s | fastest | measured, s | regret |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for case in results["cases"]:
        runs, chosen = case["runs"], case["runs"][case["chosen"]]
        fastest = min(runs, key=lambda name: runs[name]["seconds"])
        lines.append(
            f"| {case['workload']} | {case['workers']} | {len(runs)} | {case['chosen']} "
            f"| {chosen['predicted']:.2f} | {chosen['seconds']:.2f} | {fastest} "
            f"| {runs[fastest]['seconds']:.2f} | {regret(case):.0%} |"
        )
    return "\n".join(lines)
