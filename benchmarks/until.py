"""A run that ends as soon as its log says enough, for benchmarks of how soon a target is reached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Row = dict[str, float]
"""The metrics of a step."""


def train_until(recipe: str, settings: Sequence[str], run: Path, is_enough: Callable[[list[Row]], bool]) -> list[Row]:
    """Train in a process of its own until the log says enough, or the recipe's last step.

    Args:
        recipe: Path of the recipe.
        settings: Overrides, such as `steps=10`; they must lead to the folder of the run.
        run: Folder of the run, below `runs` of the folder in which the process works.
        is_enough: Function of the log's rows so far.

    Returns:
        The rows of the log up to the first that is enough.
    """
    command = [sys.executable, "-m", "leaderless", "train", recipe, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = run.parent.parent
    with (folder / f"{run.name}.log").open("w+") as log:
        training = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            while training.poll() is None:
                try:
                    training.wait(timeout=2)
                except subprocess.TimeoutExpired:
                    if is_enough(rows_of(run)):
                        (run / "stop").touch()
        finally:
            training.terminate()
        if training.returncode and not (run / "stop").exists():
            log.seek(0)
            sys.exit(f"{' '.join(command)}\n{log.read()}")
    rows = rows_of(run)
    return next((rows[:num] for num in range(1, len(rows)) if is_enough(rows[:num])), rows)


def rows_of(run: Path) -> list[Row]:
    """The complete lines of a run's log so far."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def has_reached(target: float) -> Callable[[list[Row]], bool]:
    """Whether an evaluation has reached a share of successes."""
    return lambda rows: any(row.get("evaluation/mean@1", 0.0) >= target for row in rows)
