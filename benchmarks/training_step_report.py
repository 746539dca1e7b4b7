"""The results of `benchmarks/training_step.py`: their file, a table and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/training_step.json"
PICTURE = ROOT / "docs/images/training-step.png"
PROMPTS, RESPONSES = 16, 8
PHASES = {"step": "whole step", "generation": "generation", "log_probs": "log-probs", "update": "update"}
TITLES = {
    "plain": "no KL penalty, vocabulary of 512, prompts of 32, responses of 64 tokens",
    "even": "prompts of 32, responses of 64 tokens",
    "heavy": "prompts of 32, lognormal responses of up to 512 tokens",
    "prompts": "prompts of 1,024, responses of 64 tokens",
}
"""Title of each workload in tables; all but the first have a KL penalty and a vocabulary of 10,000."""


class Run(TypedDict):
    """One run of one side.

    Each step has the seconds of each phase, the number of response tokens, and the operations that one forward pass
    must do; `product_flops` are the operations per second of a large product just before.
    """

    workload: str
    side: str
    repeat: int
    versions: dict[str, str]
    product_flops: float
    steps: list[dict[str, float]]


class Results(TypedDict):
    """All runs, and what they ran on."""

    cores: int
    parameters: dict[str, int]
    workers: int
    trl_batch: int
    runs: list[Run]


def load(path: Path = RESULTS) -> Results | None:
    """The results so far.

    Args:
        path: File of the results.

    Returns:
        None if nothing has been measured.
    """
    if not path.exists():
        return None
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results


def seconds_of(results: Results, workload: str, side: str, phase: str) -> dict[int, float]:
    """The median over the steps of each repeat."""
    return {
        run["repeat"]: median(step[phase] for step in run["steps"])
        for run in results["runs"]
        if (run["workload"], run["side"]) == (workload, side)
    }


def table(results: Results) -> str:
    """A row for each workload and phase, in Markdown; ratios are within a repeat."""
    lines = [
        "| workload | phase | ours, s | TRL, s | ours, samples/s | speedup |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, title in TITLES.items():
        for phase, phase_title in PHASES.items():
            ours, theirs = (seconds_of(results, name, side, phase) for side in ("leaderless", "trl"))
            both = sorted(ours.keys() & theirs.keys())
            ratios = [theirs[repeat] / ours[repeat] for repeat in both if ours[repeat]]
            if not ratios:
                continue
            mine = median(ours.values())
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            numbers = f"{mine:.2f} | {median(theirs.values()):.2f} | {PROMPTS * RESPONSES / mine:.1f}"
            lines.append(f"| {title} | {phase_title} | {numbers} | {median(ratios):.2f}{spread} |")
    return "\n".join(lines)


def operations(results: Results) -> str:
    """Operations per second of our passes, next to those of a large product just before, in Markdown."""
    lines = ["| workload | phase | GFLOP/s | share of a large product |", "| --- | --- | ---: | ---: |"]
    for name, title in TITLES.items():
        runs = [run for run in results["runs"] if (run["workload"], run["side"]) == (name, "leaderless")]
        # A backward pass costs two forward passes.
        for phase, passes in (("log_probs", 1), ("update", 3)):
            speeds = [
                median(passes * step["forward_flop"] / step[phase] for step in run["steps"])
                for run in runs
                if all(step[phase] for step in run["steps"])
            ]
            if speeds:
                shares = [speed / run["product_flops"] for speed, run in zip(speeds, runs, strict=True)]
                share = f"{median(shares):.0%}"
                lines.append(f"| {title} | {PHASES[phase]} | {median(speeds) / 1e9:.0f} | {share} |")
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Seconds of the phases of a step, stacked, for both sides of each workload."""
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(1, len(TITLES), figsize=(13, 3.8), layout="constrained")
    parts = ("generation", "log_probs", "update")
    for axes, (name, title) in zip(all_axes, TITLES.items(), strict=True):
        for place, side in enumerate(("leaderless", "trl")):
            bottom = 0.0
            for color, phase in enumerate((*parts, "step")):
                values = list(seconds_of(results, name, side, phase).values())
                height = median(values) if values else 0.0
                # What belongs to no phase: rewards, advantages, data.
                height = max(0.0, height - bottom) if phase == "step" else height
                label = "the rest" if phase == "step" else PHASES[phase]
                axes.bar(place, height, bottom=bottom, color=f"C{color}", label=label if place == 0 else None)
                bottom += height
        axes.set_xticks([0, 1], ["leaderless", "TRL"])
        axes.set_title(title.replace(", ", ",\n"), fontsize=9)
        axes.set_ylabel("seconds a step")
    all_axes[-1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
