"""Whether failed episodes that looked like successful ones help: GRPO and SRPO from the same weak policies.

    python benchmarks/srpo.py && python docs/generate.py

An arm over a table imitates a few demonstrations, and then learns from success alone, by each algorithm from the same
weights. In `starts`, each start has a table of its own; in `tables`, there are few tables and many starts. The share of
held-out starts that are a success is measured every few steps. Before, it is measured how much the rewards that SRPO
gives to failed episodes have to do with how near these came to their goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from until import rows_of

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/srpo.json"
LAYOUTS: Mapping[str, int] = {"starts": 0, "tables": 6}
"""Number of tables of each setting; 0 for one per start."""
ALGORITHMS: Mapping[str, Mapping[str, object]] = {
    "grpo": {"workflow": "grpo"},
    "srpo_start": {"workflow": "srpo"},
    "srpo_task": {"workflow": "srpo", "algorithm": {"advantage": {"type": "srpo", "task": "task"}}},
}
NUM_TASKS, NUM_HELD_OUT, NUM_DEMONSTRATIONS = 2048, 256, 8
STEPS, EVERY = 60, 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--settings", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table: dict[str, Any] = {}
    for seed in range(options.seeds):
        for setting in options.settings:
            one, whole = compare(LAYOUTS[setting], seed), table.setdefault(setting, {"agreement": [], "curves": {}})
            whole["agreement"].append(one["agreement"])
            for name, curve in one["curves"].items():
                whole["curves"].setdefault(name, []).append(curve)
            options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def compare(num_layouts: int, seed: int) -> dict[str, Any]:
    """Curves of all algorithms from the same policy, and how well SRPO knows which failures came near."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, num_layouts)
        common = imitate(folder, {"num_layouts": num_layouts}, NUM_DEMONSTRATIONS, seed)
        curves: dict[str, list[float]] = {}
        for algorithm, settings in ALGORITHMS.items():
            recipe = {
                **common,
                "name": algorithm,
                "models": {"policy": "imitated"},
                "batch": {"prompts_per_step": 16, "responses_per_prompt": 8, "micro_batch_tokens": 8192},
                "optimizer": {"learning_rate": 1e-3, "beta2": 0.99},
                "evaluation": {"every_steps": EVERY},
                "steps": STEPS,
                **settings,
            }
            write(folder, recipe)
            leaderless(folder, "train", f"{algorithm}.yaml")
            rows = rows_of(folder / "runs" / algorithm)
            curves[algorithm] = [row["evaluation/mean@1"] for row in rows if "evaluation/mean@1" in row]
            print(num_layouts, seed, algorithm, curves[algorithm], flush=True)
        agreement = {
            by: rank_correlation(folder / "imitated", num_layouts, seed, is_by_task=by == "task")
            for by in ("start", "task")
        }
        print(num_layouts, seed, agreement, flush=True)
    return {"curves": curves, "agreement": agreement}


def imitate(
    folder: Path, world: Mapping[str, int], num_demonstrations: int, seed: int, steps: int = 80
) -> dict[str, object]:
    """Train a weak policy in `imitated`; returns what all recipes have in common.

    Args:
        folder: Folder with the tasks.
        world: Options of the table.
        num_demonstrations: Number of demonstrations of the script.
        seed: Seed of demonstrations and runs.
        steps: Steps of imitation.
    """
    body = {"type": "table", "max_steps": 32, "num_environments": 128, "options": world}
    common: dict[str, object] = {
        "body": {**body, "demonstrations": "demonstrations"},
        "data": {"train": {"path": "train.jsonl"}, "evaluation": {"path": "test.jsonl"}},
        "seed": seed,
    }
    imitation = {
        **common,
        "name": "imitation",
        "workflow": "imitation",
        "models": {"policy": {"body": "flow"}},
        "data": {"train": {"path": "demonstrations/meta/episodes.jsonl"}},
        "batch": {"prompts_per_step": min(20, num_demonstrations), "micro_batch_tokens": 4096},
        "optimizer": {"learning_rate": 3e-3, "beta2": 0.99, "schedule": "cosine"},
        "steps": steps,
    }
    write(folder, imitation)
    count = ["--episodes", str(num_demonstrations), "--seed", str(1000 * seed)]
    leaderless(folder, "demonstrate", "imitation.yaml", "demonstrations", *count)
    leaderless(folder, "train", "imitation.yaml")
    leaderless(folder, "export", "runs/imitation", "imitated")
    return common


def rank_correlation(policy: Path, num_layouts: int, seed: int, *, is_by_task: bool) -> float:
    """Spearman's correlation of what SRPO gives to failed episodes with how near they came to the right block.

    Over all failed episodes of a group with a comparison, of ranks within the group.
    """
    from leaderless.algorithms.advantages.srpo import self_referential_rewards
    from leaderless.config.environment import BodyConfig
    from leaderless.config.models import ModelConfig
    from leaderless.embodied.rollout.policy_rollout import BodyTask, make_body_rollout
    from leaderless.embodied.simulators.tabletop import TableTask
    from leaderless.embodied.stages.films import encoder_of, film_of
    from leaderless.observability.clock import Clock

    options = {"num_layouts": num_layouts}
    config = BodyConfig(type="table", max_steps=32, num_environments=128, options=options)
    engine = make_body_rollout(ModelConfig(path=str(policy)), "models.policy", config, torch.device("cpu"))
    tasks = [
        BodyTask(8 * start + sibling, {"task": start % max(1, num_layouts)}, 50_000 + start)
        for start in range(96)
        for sibling in range(8)
    ]
    episodes = engine.play(tasks, seed=seed, temperature=1.0, progress=lambda _: None, clock=Clock())
    engine.close()
    encode, spaces = encoder_of("convolution"), engine.spaces
    films = [film_of(torch.from_numpy(np.stack(one.frames)), spaces, config.encoded_frames) for one in episodes]
    vectors = torch.stack([encode(film) for film in films if film is not None])
    success = torch.tensor([one.is_success for one in episodes])
    groups = torch.arange(len(tasks)) // 8
    numbers = torch.tensor([int(str(task.task["task"])) for task in tasks])
    ids = numbers if is_by_task and num_layouts else groups
    worth = self_referential_rewards(vectors, success, torch.ones_like(success), ids, scale=0.8, radius=1.0)
    world, nearness = TableTask(1, num_layouts=num_layouts), []
    for task, episode in zip(tasks, episodes, strict=True):
        world.reset([0], [task.task], [task.seed])
        goal = world._blocks[0, world._targets[0]]  # noqa: SLF001 - what no observation says
        nearness.append(-min(float(np.linalg.norm(state - goal)) for state in episode.states))
    pairs: list[tuple[float, float]] = []
    for group in groups.unique().tolist():
        rows = [row for row in range(8 * group, 8 * group + 8) if not success[row] and worth[row] > 0]
        if len(rows) >= 2:
            mine = [ranks([one[row] for row in rows]) for one in (worth.tolist(), nearness)]
            pairs += zip(*mine, strict=True)
    first, second = np.array(pairs).T
    return float(np.corrcoef(first, second)[0, 1])


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from -1 to 1."""
    order = np.argsort(np.argsort(values))
    return (2 * order / (len(values) - 1) - 1).tolist()


def write_tasks(folder: Path, num_layouts: int) -> None:
    for name, first, count in (("train", 0, NUM_TASKS), ("test", 1_000_000, NUM_HELD_OUT)):
        rows = [{"task": number % max(1, num_layouts), "seed": first + number} for number in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(folder: Path, recipe: Mapping[str, object]) -> None:
    (folder / f"{recipe['name']}.yaml").write_text(json.dumps(recipe))


def leaderless(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "leaderless", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
