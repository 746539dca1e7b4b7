"""Windows: the time of a step when rows are sent and scored while the next are sampled, and when they are not.

    python benchmarks/overlap.py

Two workers of one core each train a model of a million parameters with GRPO on 64 prompts with 4 responses each, of 32
and up to 96 tokens. One samples and rewards; the other computes the log-probabilities of two models and updates.
The settings take turns, and the first steps of each run are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from made import ROOT, prepare, train

RESULTS = ROOT / "docs/scaling/overlap.json"
POOLS = {"rollout": 0, "reward": 0, "reference": 1, "old": 1, "advantage": 1, "policy": 1}
SETTINGS = [
    "batch={prompts_per_step: 64, responses_per_prompt: 4, updates_per_step: 2, micro_batch_tokens: 4096}",
    "rollout={max_response_tokens: 96, max_sequences: 32}",
    "algorithm.kl.coefficient=0.01",
    f"layout={json.dumps({node: {'ranks': rank} for node, rank in POOLS.items()})}",
]
WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--windows", nargs="+", type=int, default=(1, 2, 4, 8), help="windows per step; the first is the baseline"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run, after one that is left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    seconds: dict[int, list[float]] = {windows: [] for windows in options.windows}
    hidden: dict[int, list[float]] = {windows: [] for windows in options.windows}
    with tempfile.TemporaryDirectory(prefix="overlap-") as name:
        folder = Path(name)
        prepare(folder, hidden_size=128, num_layers=4, prompt_tokens=32)
        for repeat in range(options.repeats):
            for windows in options.windows:
                settings = [f"batch.windows_per_step={windows}", f"steps={WARM_UP + options.steps}"]
                steps = train(folder, f"windows-{windows}-{repeat}", [*SETTINGS, *settings], num_workers=2)
                measured = [step for step in steps if step["step"] > WARM_UP]
                seconds[windows].append(median(step["time/step"] for step in measured))
                hidden[windows].append(median(map(time_hidden, measured)))
                print(f"{windows} windows: {seconds[windows][-1]:.2f} s a step", file=sys.stderr)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    results = {"cores": cores, "steps": options.steps, "seconds": seconds, "hidden": hidden}
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(seconds, hidden))


def time_hidden(step: Mapping[str, float]) -> float:
    """Seconds of the rollout in which the second worker does not wait for rows; without windows it always does."""
    return step["time/rollout"] - step["time/waiting"] if "time/waiting" in step else 0.0


def table(seconds: Mapping[int, Sequence[float]], hidden: Mapping[int, Sequence[float]]) -> str:
    """A row for each number of windows, in Markdown; ratios are within a repeat."""
    first = next(iter(seconds.values()))
    lines = [
        "| windows | seconds a step | of the time with the first | seconds hidden |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for windows, values in seconds.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        lines.append(f"| {windows} | {median(values):.2f} | {spread(ratios)} | {spread(hidden[windows])} |")
    return "\n".join(lines)


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
