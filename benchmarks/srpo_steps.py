"""Steps to 90 % success: GRPO and SRPO from the same weak policies, on tables whose only reward is success.

    python benchmarks/srpo_steps.py && python docs/generate.py

The settings are those of the quickstart for robots. By start, each start has a table of its own, and SRPO compares its
episodes; by task, there are few tables with many starts, and SRPO compares all episodes on a table. Tables that are
seen again and again are easier, so policies have imitated fewer demonstrations there. A run ends at the first
evaluation that reaches 90 %, or after its last step. Algorithms take turns, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srpo import LAYOUTS, imitate, write, write_tasks
from until import has_reached, train_until

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/srpo_steps.json"
TARGET, STEPS, EVERY = 0.9, 120, 10
Curve = list[tuple[float, float]]
"""Steps and success."""


@dataclass(frozen=True)
class Way:
    """What SRPO compares an episode with.

    Attributes:
        num_tables: Number of tables; 0 for one per start.
        num_demonstrations: Number of demonstrations that policies have imitated.
        imitation_steps: Steps of imitation.
        settings: Additional settings of the recipe of SRPO.
    """

    num_tables: int
    num_demonstrations: int
    imitation_steps: int
    settings: Mapping[str, object] = field(default_factory=dict)


WAYS: Mapping[str, Way] = {
    "start": Way(LAYOUTS["starts"], 40, 150),
    "task": Way(LAYOUTS["tables"], 8, 80, {"algorithm": {"advantage": {"type": "srpo", "task": "task"}}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(5)))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for seed in options.seeds:
        for way in options.ways:
            for algorithm, curve in race(way, seed).items():
                table.setdefault(way, {}).setdefault(algorithm, {})[str(seed)] = curve
            options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def race(way: str, seed: int) -> dict[str, Curve]:
    """Steps and success of GRPO and SRPO, from the same imitation."""
    how = WAYS[way]
    curves: dict[str, Curve] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, how.num_tables)
        world = {"num_layouts": how.num_tables}
        common = imitate(folder, world, how.num_demonstrations, seed, how.imitation_steps)
        for algorithm, settings in {"grpo": {}, "srpo": how.settings}.items():
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
                **settings,
            }
            write(folder, recipe)
            rows = train_until(f"{algorithm}.yaml", (), folder / "runs" / algorithm, has_reached(TARGET))
            curves[algorithm] = [(row["step"], row["evaluation/mean@1"]) for row in rows if "evaluation/mean@1" in row]
            print(way, seed, algorithm, curves[algorithm], flush=True)
    return curves


if __name__ == "__main__":
    main()
