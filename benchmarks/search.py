"""What the search example learns, with and without searching, for some seeds.

    pip install --editable .[search]
    python benchmarks/search.py && python docs/generate.py

For each seed everything is new: names, questions, demonstrations, weights, sampling. An interrupted benchmark continues
where it stopped; remove its folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/search.json"
RECIPES = ROOT / "recipes/agents/search"
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=2, help="seeds at a time, each with one worker and one core")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/search-benchmark", help="folder for data and runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with ThreadPoolExecutor(options.parallel) as pool:
        runs = list(pool.map(lambda seed: measure(seed, options.folder.resolve() / f"seed-{seed}"), options.seeds))
    options.results.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


def measure(seed: int, folder: Path) -> dict[str, object]:
    """The accuracies of a seed, and the seconds of each run."""
    folder.mkdir(parents=True, exist_ok=True)
    once(folder, "data", "-c", f"from examples.search.prepare import *; prepare(Path('runs/search-data'), {seed})")
    train(folder, "sft", seed)
    once(folder, "export", "-m", "leaderless", "export", "runs/search-sft", "runs/search-base")
    train(folder, "grpo", seed)
    train(folder, "closed_book", seed)
    return {
        "seed": seed,
        "guess": best_guess(folder / "runs/search-data"),
        "search": by_step(folder / "runs/search", "evaluation/mean@1"),
        "messages": by_step(folder / "runs/search", "episode/turns"),
        "closed_book": by_step(folder / "runs/search-closed-book", "evaluation/mean@1"),
        "seconds": {part: seconds(folder, part) for part in ("data", "sft", "grpo", "closed_book")},
    }


def train(folder: Path, recipe: str, seed: int) -> None:
    once(folder, recipe, "-m", "leaderless", "train", str(RECIPES / f"{recipe}.yaml"), f"seed={seed}", "--workers", "1")


def once(folder: Path, part: str, *arguments: str) -> None:
    """Run a command with one core, unless it has succeeded before."""
    done = folder / f"{part}.json"
    if done.exists():
        return
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    begin = time.perf_counter()
    with (folder / f"{part}.log").open("w") as log:
        subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    done.write_text(json.dumps({"seconds": time.perf_counter() - begin}))


def seconds(folder: Path, part: str) -> float:
    value: float = json.loads((folder / f"{part}.json").read_text())["seconds"]
    return round(value, 1)


def by_step(run: Path, metric: str) -> dict[str, float]:
    """A metric by step, where there was an evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {str(line["step"]): line[metric] for line in lines if "evaluation/mean@1" in line and metric in line}


def best_guess(data: Path) -> float:
    """Accuracy of whoever answers each kind of held-out question with its most frequent answer in training."""
    train, test = (
        [json.loads(line) for line in (data / f"{n}.jsonl").read_text().splitlines()] for n in ("train", "test")
    )
    by_kind: dict[str, Counter[str]] = {}
    for row in train:
        by_kind.setdefault(row["kind"], Counter())[row["answer"]] += 1
    return sum(row["answer"] == by_kind[row["kind"]].most_common(1)[0][0] for row in test) / len(test)


if __name__ == "__main__":
    main()
