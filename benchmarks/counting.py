"""Learning to count squares in pictures, over several seeds, and whether the model looks at the pictures.

    python benchmarks/counting.py && python docs/generate.py
    python benchmarks/counting.py --recipe ppo && python docs/generate.py

A tiny model imitates answers and then learns from right or wrong, by the recipes in `recipes/vision/counting`. In the
end it answers the held-out questions once more, with the pictures of others: a model that looks at them is then right
no more often than by guessing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from until import rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance"
RECIPES = ROOT / "recipes/vision/counting"
ACCURACY = "evaluation/mean@1"
RUNS = {"grpo": "counting", "ppo": "counting-ppo"}
"""Name of the run of each recipe."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", choices=sorted(RUNS), default="grpo")
    parser.add_argument("--results", type=Path, help="runs of other seeds in it are kept")
    options = parser.parse_args()
    results: Path = options.results or RESULTS / ("counting.json" if options.recipe == "grpo" else "counting_ppo.json")
    for seed in options.seeds:
        outcome = learn(seed, options.recipe)
        print(json.dumps(outcome), flush=True)
        known = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        runs = sorted([run for run in known if run["seed"] != seed] + [outcome], key=lambda run: run["seed"])
        results.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")


def learn(seed: int, recipe: str) -> dict[str, Any]:
    """The curve of a seed's held-out accuracy, what it is with the pictures of others, and the seconds of the runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = f"from examples.counting.prepare import *; prepare(Path({str(folder / 'runs/counting-data')!r}), {seed})"
        subprocess.run([sys.executable, "-c", data], cwd=ROOT, check=True)
        imitation_s = leaderless(folder, "train", RECIPES / "sft.yaml", f"seed={seed}")
        leaderless(folder, "export", "runs/counting-sft", "runs/counting-base")
        reinforcement_s = leaderless(folder, "train", RECIPES / f"{recipe}.yaml", f"seed={seed}")
        lines = rows_of(folder / "runs" / RUNS[recipe])
        return {
            "seed": seed,
            "curve": {line["step"]: line[ACCURACY] for line in lines if ACCURACY in line},
            "shuffled": shuffled_accuracy(folder, recipe),
            "imitation_s": round(imitation_s, 1),
            "reinforcement_s": round(reinforcement_s, 1),
        }


def shuffled_accuracy(folder: Path, recipe: str) -> float:
    """Accuracy on the held-out questions, each with the picture of another."""
    where = ["--checkpoint", f"runs/{RUNS[recipe]}", "data.evaluation.path=runs/counting-data/shuffled.jsonl", "--json"]
    command = [sys.executable, "-m", "leaderless", "eval", str(RECIPES / f"{recipe}.yaml"), *where]
    answer = subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    return float(json.loads(answer.stdout)[ACCURACY])


def leaderless(folder: Path, *arguments: object) -> float:
    """Run a command in a folder, and return the seconds that it took."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "leaderless", *map(str, arguments)]
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, stdout=sys.stderr)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
