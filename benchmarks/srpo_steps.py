"""Steps to 90 % success: GRPO and SRPO from the same weak policies, on tables whose only reward is success.

    python benchmarks/srpo_steps.py && python docs/generate.py

The settings are those of the quickstart for robots: each start has a table of its own, and policies have imitated 40
demonstrations. A run ends at the first evaluation that reaches 90 %, or after its last step. Algorithms take turns,
seed by seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from srpo import imitate, write, write_tasks
from until import has_reached, train_until

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/srpo_steps.json"
ALGORITHMS = ("grpo", "srpo")
"""Built-in workflows."""
NUM_DEMONSTRATIONS, IMITATION_STEPS = 40, 150
TARGET, STEPS, EVERY = 0.9, 120, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5)))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for seed in options.seeds:
        for algorithm, curve in race(seed).items():
            table.setdefault(algorithm, {})[str(seed)] = curve
        options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def race(seed: int) -> dict[str, list[tuple[float, float]]]:
    """Steps and success of each algorithm, from the same imitation."""
    curves: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, 0)
        common = imitate(folder, {}, NUM_DEMONSTRATIONS, seed, IMITATION_STEPS)
        for algorithm in ALGORITHMS:
            recipe = {
                **common,
                "name": algorithm,
                "workflow": algorithm,
                "models": {"policy": "imitated"},
                "batch": {
                    "prompts_per_step": 48,
                    "responses_per_prompt": 8,
                    "updates_per_step": 2,
                    "micro_batch_tokens": 8192,
                },
                "optimizer": {"learning_rate": 1e-3, "beta2": 0.99},
                "evaluation": {"every_steps": EVERY},
                "steps": STEPS,
            }
            write(folder, recipe)
            rows = train_until(f"{algorithm}.yaml", (), folder / "runs" / algorithm, has_reached(TARGET))
            curves[algorithm] = [(row["step"], row["evaluation/mean@1"]) for row in rows if "evaluation/mean@1" in row]
            print(seed, algorithm, curves[algorithm], flush=True)
    return curves


if __name__ == "__main__":
    main()
