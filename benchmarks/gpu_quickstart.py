"""A part of `benchmarks/gpu.py`: the quickstart, with one worker."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from gpu_machine import Machine, Result

ROOT = Path(__file__).resolve().parents[1]


def quickstart(machine: Machine) -> Result:
    """Imitation, export, and reinforcement learning of the quickstart; few steps on a CPU."""
    few = ["steps=1", "evaluation.every_steps=0"] * machine.is_trial
    train = ["-m", "leaderless", "train"]
    commands = {
        "prepare": [str(ROOT / "examples/quickstart/prepare.py")],
        "imitate": [*train, "recipes/quickstart/sft.yaml", "--workers", "1", "--fresh", *few],
        "export": ["-m", "leaderless", "export", "runs/quickstart-sft", "runs/quickstart-base"],
        "reinforce": [*train, "recipes/quickstart/grpo.yaml", "--workers", "1", "--fresh", *few],
    }
    shutil.rmtree(ROOT / "runs/quickstart-base", ignore_errors=True)  # of an earlier quickstart
    seconds: dict[str, float] = {}
    result: Result = {"seconds": seconds, "accuracy": []}
    for name, command in commands.items():
        begin = time.monotonic()
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        seconds[name] = round(time.monotonic() - begin, 1)
        machine.say(result)
    text = (ROOT / "runs/quickstart/metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    accuracies = [value for line in lines for key, value in line.items() if key == "evaluation/accuracy"]
    result["accuracy"] = [accuracies[0], accuracies[-1]] if accuracies else []
    return result | {"mismatch": lines[-1].get("mismatch/abs_mean")}
