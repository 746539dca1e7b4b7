"""The memory of runs of bodies: the most that a worker held, and what `leaderless plan` expects, on a CPU.

    python benchmarks/body_memory.py && python docs/generate.py

The table of blocks is played with many rows, with wide passes, with many weights, of which there are copies after a
checkpoint, and by SAC, whose critics have many. Only memory that the system cannot take back counts, as in
benchmarks/real_size.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.real_size import Watch

from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/performance/body_memory.json"
CASES: Mapping[str, Mapping[str, object]] = {
    "many rows": {
        "models": {"policy": {"body": {"type": "film", "options": {"chunk": 1}}}},
        "batch": {"prompts_per_step": 128, "responses_per_prompt": 8, "micro_batch_tokens": 256},
    },
    "wide passes": {
        "models": {"policy": {"body": {"type": "film", "options": {"chunk": 1}}}},
        "batch": {"prompts_per_step": 8, "responses_per_prompt": 8, "micro_batch_tokens": 8192},
    },
    "many weights": {
        "models": {"policy": {"body": {"type": "cnn", "options": {"hidden_size": 4096, "num_features": 4096}}}},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 8, "micro_batch_tokens": 512},
        "steps": 3,
    },
    "critics of SAC": {
        "workflow": "sac",
        "models": {"policy": {"body": {"type": "squashed_cnn", "options": {"chunk": 1}}}},
        "algorithm": {"sac": {"hidden_size": 768, "num_layers": 3, "updates_per_decision": 0.01, "critic_updates": 1}},
        "batch": {"prompts_per_step": 8, "responses_per_prompt": 1},
        "steps": 3,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="the only run to measure; results of others stay as they are")
    only = parser.parse_args().only
    table = json.loads(RESULTS.read_text(encoding="utf-8")) if only and RESULTS.exists() else {}
    table |= {name: measure(name, changes) for name, changes in CASES.items() if only in {None, name}}
    RESULTS.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def measure(name: str, changes: Mapping[str, object]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        tasks = Path(folder) / "tasks.jsonl"
        tasks.write_text('{"task": 0}\n', encoding="utf-8")
        settings = {
            "name": "memory",
            "workflow": "grpo",
            "body": {"type": "table", "max_steps": 32, "num_environments": 64},
            "data": {"train": {"path": str(tasks)}},
            "run": {"directory": folder},
            "checkpoint": {"every_steps": 1},
            "steps": 1,
            **changes,
        }
        path = Path(folder) / "recipe.yaml"
        path.write_text(json.dumps(settings), encoding="utf-8")
        recipe = load_recipe(str(path)).recipe
        memory = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(1)).memory
        assert memory is not None
        command = [sys.executable, "-m", "leaderless", "train", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        watch = Watch(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL))
        watch.wait()
        found = {"measured": watch.peak(0), "planned": memory.cpu.peak}
    print(name, {kind: f"{size / 2**20:.0f} MiB" for kind, size in found.items()}, flush=True)
    return found


if __name__ == "__main__":
    main()
