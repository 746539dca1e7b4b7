"""Windows: what a step takes when rows travel and are scored while the next are sampled, and when they are not.

    pip install --editable .[benchmarks]
    python benchmarks/overlap.py

Two workers of one core each train the quickstart's model with GRPO; one samples and rewards, the other computes
log-probs and updates. The settings take turns, and the first steps of each run are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from algorithms import ROOT, prepare

RESULTS = ROOT / "docs/scaling/overlap.json"
LAYOUT = "{rollout: {ranks: 0}, reward: {ranks: 0}, reference: {ranks: 1}, policy: {ranks: 1}}"
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", nargs="+", type=int, default=(1, 2, 4, 8), help="the first is compared with")
    parser.add_argument("--steps", type=int, default=8, help="of each run, beyond those that are left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark", help="for data, models and runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    prepare(folder)
    seconds: dict[int, list[float]] = {windows: [] for windows in options.windows}
    waiting: dict[int, list[float]] = {windows: [] for windows in options.windows}
    for repeat in range(options.repeats):
        for windows in options.windows:
            steps = train(folder, windows, f"overlap-{windows}-{repeat}-{os.getpid()}", WARM_UP + options.steps)
            seconds[windows].append(median(step["time/step"] for step in steps))
            waiting[windows].append(median(step.get("time/waiting", 0.0) for step in steps))
            print(f"{windows} windows: {seconds[windows][-1]:.2f} s a step", file=sys.stderr)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results = {"steps": options.steps, "seconds": seconds, "waiting": waiting}
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(seconds, waiting))


def train(folder: Path, windows: int, name: str, num_steps: int) -> list[dict[str, float]]:
    """The numbers of a run's steps, the first left out."""
    overrides = [f"name={name}", f"layout={LAYOUT}", f"batch.windows_per_step={windows}", f"steps={num_steps}"]
    overrides += ["batch.prompts_per_step=128", "evaluation.every_steps=0", "run.recorded_prompts=0"]
    command = ["-m", "leaderless", "train", str(ROOT / "recipes/quickstart/grpo.yaml"), *overrides, "--workers", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}; see {folder / name}.log")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [step for step in map(json.loads, lines) if step["step"] > WARM_UP]


def table(seconds: dict[int, list[float]], waiting: dict[int, list[float]]) -> str:
    """A row for each number of windows, in Markdown; ratios are within a repeat."""
    first = next(iter(seconds.values()))
    lines = ["| windows | seconds a step | of the time with the first | waiting |", "| ---: | ---: | ---: | ---: |"]
    for windows, values in seconds.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {windows} | {median(values):.2f} | {spread} | {median(waiting[windows]):.2f} s |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
