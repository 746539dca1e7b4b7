"""The simulated pictures of docs/scaling/.

    pip install --editable .[benchmarks]
    python benchmarks/simulation.py

Takes a few minutes, most of them for the sweeps up to 16,384 ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulated.charts import draw_png, write_page
from benchmarks.simulated.controllers import load_compared_cluster
from benchmarks.simulated.show import print_sweep
from benchmarks.simulated.sweep import Sweep, settings_of, simulate

from leaderless import Run
from leaderless.config import Recipe
from leaderless.planner import Plan
from leaderless.planner.workflow import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/scaling/grpo.yaml"


@dataclass(frozen=True)
class Case:
    """A sweep.

    Attributes:
        cluster: File in `recipes/clusters`, without its suffix.
        world_sizes: Numbers of ranks.
        prompts: Prompts of a step; none leaves the recipe's.
        contexts: Tokens of prompt and response; none leaves the recipe's.
        prompts_per_rank: Prompts of a step for each rank.
        overrides: Settings as `section.key=value`.
    """

    cluster: str
    world_sizes: Sequence[int]
    prompts: Sequence[int] = ()
    contexts: Sequence[int] = ()
    prompts_per_rank: int | None = None
    overrides: tuple[str, ...] = ()


RANKS = (8, 64, 512, 1024, 2048, 4096, 8192, 16384)
LARGE = ("models.policy.path=recipes/scaling/qwen2.5-32b", "rollout.max_sequences=16")
FEW = ("rollout.max_sequences=8",)
SWEEPS = {
    "simulated-ranks": Case("h100", RANKS, prompts_per_rank=8),
    "simulated-ranks-64k": Case("h100", RANKS, contexts=(65536,), prompts_per_rank=8, overrides=FEW),
    "simulated-ranks-32b": Case("h200", RANKS[1:], prompts_per_rank=8, overrides=LARGE),
    "simulated-context": Case("h100", (1024,), contexts=(8192, 16384, 32768, 65536), overrides=FEW),
    "simulated-batch": Case("h100", (1024,), prompts=[512 << power for power in range(8)]),
}
"""Sweeps by the name of the picture."""


def run(case: Case, recipe: Path = RECIPE, clusters: Path = ROOT / "recipes/clusters") -> Sweep:
    """Simulate all points of a sweep.

    Args:
        case: Quantity that varies, and its values.
        recipe: Recipe of all points.
        clusters: Folder of the cluster file.
    """
    cluster, loaded = load_compared_cluster(clusters / f"{case.cluster}.yaml"), load_recipe(recipe, case.overrides)

    def plan_for(more: Sequence[str], num_ranks: int) -> tuple[Recipe, Plan]:
        one = Run(recipe, *case.overrides, *more)
        return one.recipe, one.plan(num_ranks)

    axis, settings = settings_of(loaded.recipe, case.world_sizes, case.prompts, case.contexts, case.prompts_per_rank)
    return Sweep(loaded.recipe.name, cluster, axis, tuple(simulate(settings, plan_for, cluster)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/simulation", help="folder for numbers and pages")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    for name in options.sweeps:
        folder: Path = options.folder.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        sweep = run(SWEEPS[name])
        print_sweep(sweep, Console())
        (folder / "simulation.json").write_text(json.dumps(sweep.to_json(), indent=1) + "\n", encoding="utf-8")
        write_page(sweep, folder / "simulation.html")
        draw_png(sweep, options.pictures / f"{name}.png")


if __name__ == "__main__":
    main()
