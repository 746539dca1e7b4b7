"""Runs that begin with the model of the quickstart after supervised fine-tuning, for benchmarks of learning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/quickstart/grpo.yaml"
BASE = ROOT / "runs/quickstart-base"
NUM_LAST = 3
"""Evaluations at the end of a run whose mean is its accuracy."""


def make_base() -> None:
    """Train the model with which all runs begin, if it is not there."""
    if not BASE.exists():
        run("examples/quickstart/prepare.py")
        run("-m", "leaderless", "train", "recipes/quickstart/sft.yaml", "--workers", "2", "--fresh")
        run("-m", "leaderless", "export", "runs/quickstart-sft", str(BASE))


def run(*arguments: str) -> None:
    """Run Python in the root of the repository."""
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=sys.stderr)


def read(file: Path) -> list[dict[str, float]]:
    """The lines of a log."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
