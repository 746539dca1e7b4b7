"""What GDPO learns of two rewards of different scales, next to GRPO, for some seeds.

    python benchmarks/gdpo.py && python docs/generate.py

The task is that of `leaderless new`: answer with the larger of two digits. One reward is for the digit, the other one,
in a unit of its own and much smaller, for ending the response behind it. A model with random weights learns both from
nothing. GRPO is also given the second reward in the scale of the first. An interrupted benchmark continues where it
stopped; remove its folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless import RewardInput

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/gdpo.json"
SMALL = 0.02
"""Largest value of the second reward, of which the first one's is 1."""
NAMES = {"digit": "benchmarks.gdpo:is_right", "end": "benchmarks.gdpo:ends_in_time"}
WAYS: Mapping[str, tuple[str, float]] = {"grpo": ("grpo", 1.0), "scaled": ("grpo", 1 / SMALL), "gdpo": ("gdpo", 1.0)}
"""Ways to train: the advantage, and the weight of the second reward."""
SEEDS, NUM_STEPS = (0, 1, 2), 100


def is_right(sample: RewardInput) -> float:
    """1 for a response that begins with the right digit, else 0."""
    return float(sample.response.startswith(str(sample.answer)))


def ends_in_time(sample: RewardInput) -> float:
    """`SMALL` for a response of one character, half as much for two, else 0."""
    return SMALL * max(0, 3 - max(1, len(sample.response))) / 2 if not sample.is_truncated else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/gdpo-benchmark", help="folder for data and runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = [
        {"way": way, "seed": seed, **train(options.folder.resolve() / f"seed-{seed}", way, seed, options.steps)}
        for seed in options.seeds
        for way in WAYS
    ]
    found = {"small": SMALL, "steps": options.steps, "runs": runs}
    options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def train(folder: Path, way: str, seed: int, num_steps: int) -> dict[str, Sequence[float]]:
    """The mean of each reward by step, as a share of its largest value; a run that is there is not repeated."""
    from leaderless.cli.quickstart_project.project import write_project

    if not folder.exists():
        write_project(folder, seed=seed)
    advantage, weight = WAYS[way]
    rewards = {NAMES["digit"]: 1.0, NAMES["end"]: weight}
    settings = {
        "name": way,
        "steps": num_steps,
        "seed": seed,
        "evaluation.every_steps": 0,
        "loggers": "[]",
        "reward": json.dumps(rewards),
        "algorithm.advantage.type": advantage,
        "run.reward_processes": 0,
    }
    run = folder / "runs" / way
    if not (run / "report.html").exists():
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        subprocess.run(
            [sys.executable, "-m", "leaderless", "train", "recipe.yaml", "--workers", "1"]
            + [f"{key}={value}" for key, value in settings.items()],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            check=True,
        )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scales = {"digit": 1.0, "end": SMALL}
    return {
        part: [round(line[f"reward/{name}"] / scales[part], 4) for line in lines if f"reward/{name}" in line]
        for part, name in NAMES.items()
    }


if __name__ == "__main__":
    main()
