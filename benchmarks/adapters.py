"""What tiny models learn in environments of other packages: a task of reasoning-gym, and a game of TextArena.

    pip install --editable .[reasoning-gym,textarena,benchmarks]
    python benchmarks/adapters.py  # the table goes into docs/guides/adapters.md

For each seed everything is new: tasks, demonstrations, weights, sampling. An interrupted benchmark continues where it
stopped; remove its folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes/agents"
RESULTS = ROOT / "docs/performance/adapters.json"
PICTURE = ROOT / "docs/images/adapters.png"
NUM_STEPS = 60
EVERY_STEPS = 30
AGAINST_RANDOM = "environment.type=examples.nim.game:AgainstRandom"


@dataclass(frozen=True)
class Outcome:
    """One training.

    Attributes:
        task: `spelling` of reasoning-gym, or `nim` of TextArena.
        seed: Seed of everything.
        curve: Share of held-out words that the policy spells right, or of games that it wins against a random player,
            by the number of steps of reinforcement learning. It samples as in training.
        seconds: Duration of each part.
    """

    task: str
    seed: int
    curve: dict[str, float]
    seconds: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=2, help="trainings at a time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/adapters-benchmark", help="folder for all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    trainings = [(measure, seed) for seed in options.seeds for measure in (nim, spelling)]
    with ThreadPoolExecutor(options.parallel) as pool:
        outcomes = list(pool.map(lambda one: one[0](one[1], options.folder.resolve()), trainings))
    runs = [asdict(outcome) for outcome in outcomes]
    options.results.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    draw(outcomes, options.picture)
    print(table(outcomes))


def spelling(seed: int, home: Path) -> Outcome:
    """Imitate a careless teacher, then learn from the score of reasoning-gym."""
    folder = home / f"spelling-{seed}"
    begin(folder, "spelling", "reasoning_gym", seed)
    train(folder, RECIPES / "reasoning_gym/grpo.yaml", seed)
    lines = [json.loads(line) for line in (folder / "runs/spelling/metrics.jsonl").read_text().splitlines()]
    curve = {str(line["step"]): round(line["evaluation/mean@1"], 4) for line in lines if "evaluation/mean@1" in line}
    return Outcome("spelling", seed, curve, seconds(folder))


def nim(seed: int, home: Path) -> Outcome:
    """Imitate random players, then play against itself; measured against a random player."""
    folder, recipe = home / f"nim-{seed}", RECIPES / "textarena/self_play.yaml"
    begin(folder, "nim", "textarena", seed)
    train(folder, recipe, seed)
    curve = {}
    for step in range(0, NUM_STEPS + 1, EVERY_STEPS):
        checkpoint = ["--checkpoint", f"runs/nim/checkpoints/step-{step:06}"] if step else []
        name = f"eval-{step}"
        once(folder, name, "-m", "leaderless", "eval", str(recipe), AGAINST_RANDOM, *checkpoint, "--json")
        printed = (folder / f"{name}.log").read_text()
        curve[str(step)] = round(json.loads(printed[printed.index("{") :])["evaluation/mean@1"], 4)
    return Outcome("nim", seed, curve, seconds(folder))


def begin(folder: Path, name: str, recipes: str, seed: int) -> None:
    """Make the data and the model, and imitate."""
    folder.mkdir(parents=True, exist_ok=True)
    data = f"from examples.{name}.prepare import *; prepare(Path('runs/{name}-data'), {seed})"
    once(folder, "data", "-c", data)
    train(folder, RECIPES / recipes / "sft.yaml", seed)
    once(folder, "export", "-m", "leaderless", "export", f"runs/{name}-sft", f"runs/{name}-base")


def train(folder: Path, recipe: Path, seed: int) -> None:
    once(folder, recipe.stem, "-m", "leaderless", "train", str(recipe), f"seed={seed}", "--workers", "1")


def once(folder: Path, part: str, *arguments: str) -> None:
    """Run Python with one core, unless it has succeeded before."""
    done = folder / f"{part}.json"
    if done.exists():
        return
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    began_s, command = time.perf_counter(), [sys.executable, *arguments]
    with (folder / f"{part}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    done.write_text(json.dumps({"seconds": time.perf_counter() - began_s}), encoding="utf-8")


def seconds(folder: Path) -> dict[str, float]:
    return {file.stem: round(json.loads(file.read_text())["seconds"], 1) for file in sorted(folder.glob("*.json"))}


def table(outcomes: Sequence[Outcome]) -> str:
    """The results as a table in Markdown."""
    seeds = sorted({outcome.seed for outcome in outcomes})
    lines = [f"| steps | {' | '.join(f'{task}, seed {seed}' for task in ('spelling', 'nim') for seed in seeds)} |"]
    lines.append("| --- |" + " --- |" * (2 * len(seeds)))
    curves = {(outcome.task, outcome.seed): outcome.curve for outcome in outcomes}
    for step in range(0, NUM_STEPS + 1, EVERY_STEPS):
        shares = [curves[task, seed].get(str(step)) for task in ("spelling", "nim") for seed in seeds]
        lines.append(f"| {step} | {' | '.join('' if share is None else f'{share:.2f}' for share in shares)} |")
    return "\n".join(lines)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """The curves of all seeds."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), sharey=True, layout="constrained")
    titles = {"spelling": "words spelled backward", "nim": "games won against a random player"}
    for axis, (task, title) in zip(axes, titles.items(), strict=True):
        for outcome in outcomes:
            if outcome.task == task:
                axis.plot([int(step) for step in outcome.curve], outcome.curve.values(), label=f"seed {outcome.seed}")
        axis.set(title=title, xlabel="step", ylim=(0, 1))
        axis.grid(visible=True, alpha=0.3)
    axes[1].axhline(0.5, color="gray", linestyle="--", linewidth=1, label="random player")
    axes[1].legend(fontsize="small")
    axes[0].set_ylabel("share")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
