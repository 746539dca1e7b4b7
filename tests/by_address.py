"""Trainings whose environment is a server, by its address."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny import tiny_model, write_recipe


def trained(folder: Path, kind: str, url: str, **changes: Any) -> tuple[list[Mapping[str, float]], str]:
    """The metrics of the steps of a run that plays by address, and what it has printed."""
    environment = {"type": kind, "options": {"url": url}, "max_turns": 4, "max_episode_tokens": 64}
    settings = {"environment": environment, "reward": {}, "batch.micro_batch_tokens": 256} | changes
    recipe = write_recipe(folder, tiny_model(num_layers=1), settings)
    command = [sys.executable, "-m", "leaderless", "train", str(recipe)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    file = folder / "runs/tiny/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line.get("step")], done.stdout + done.stderr
