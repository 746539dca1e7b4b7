"""What adapters learn: curves of the quickstart with all weights and with adapters, for several seeds.

    python benchmarks/lora.py  # the table goes into docs/performance/adapters.md

All runs begin with the same model after supervised fine-tuning, and differ in what is trained and how fast. Those of a
seed take turns; each is saved as soon as it is done, and an interrupted benchmark continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lora_report import EVERY, FULL, RESULTS, Outcome, load, table
from quickstart_runs import RECIPE, ROOT, make_base, read, run

WAYS: Mapping[str, Sequence[str]] = {
    FULL: (),
    "rank 8": ("models.policy={path: runs/quickstart-base, lora: {rank: 8}}", "optimizer.learning_rate=1e-3"),
    "rank 1": ("models.policy={path: runs/quickstart-base, lora: {rank: 1}}", "optimizer.learning_rate=1e-3"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    make_base()
    outcomes = load(options.results)
    for seed in options.seeds:
        for way in options.ways:
            if not any((one.way, one.seed) == (way, seed) for one in outcomes):
                outcomes.append(measure(way, seed, options.steps, options.workers))
                text = json.dumps([asdict(one) for one in outcomes], indent=1)
                options.results.write_text(text + "\n", encoding="utf-8")
    print(table(outcomes))


def measure(way: str, seed: int, steps: int, num_workers: int) -> Outcome:
    """Train once."""
    folder = ROOT / f"runs/lora-{seed}"
    run(
        *("-m", "leaderless", "train", RECIPE, "--workers", str(num_workers), "--fresh"),
        *(f"name={folder.name}", f"seed={seed}", f"steps={steps}", f"evaluation.every_steps={EVERY}", *WAYS[way]),
        *("loggers=[]", "checkpoint.every_minutes=0"),
    )
    rows = read(folder / "metrics.jsonl")
    shutil.rmtree(folder)
    return Outcome(way, seed, [row["evaluation/mean@1"] for row in rows if "evaluation/mean@1" in row])


if __name__ == "__main__":
    main()
