"""An arm that learns to reach for the block that it is told, on the CPU, in a few minutes.

It runs the commands that a person would type, from the root of the repository:

    leaderless demonstrate recipes/quickstart/robot_imitation.yaml runs/quickstart-demonstrations --episodes 40
    leaderless train recipes/quickstart/robot_imitation.yaml --workers 2
    leaderless export runs/quickstart-imitation runs/quickstart-imitated
    leaderless train recipes/quickstart/robot.yaml --workers 2
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from quickstart import RUNS, accuracies, console, leaderless

NUM_TASKS, NUM_HELD_OUT = 4096, 512


def main() -> None:
    """Record, imitate, export, reinforce, and print the result."""
    begin = time.monotonic()
    workers = str(min(2, len(os.sched_getaffinity(0))))
    for name in ("demonstrations", "imitated", "tasks"):
        shutil.rmtree(RUNS / f"quickstart-{name}", ignore_errors=True)
    write_tasks(RUNS / "quickstart-tasks")
    console.rule("[bold]1/4  demonstrations: a script reaches for blocks 40 times")
    imitation = "recipes/quickstart/robot_imitation.yaml"
    leaderless("demonstrate", imitation, "runs/quickstart-demonstrations", "--episodes", "40")
    console.rule("[bold]2/4  imitation, by a policy that sees the table and reads what to do")
    leaderless("train", imitation, "--workers", workers, "--fresh")
    console.rule("[bold]3/4  the policy as a folder")
    leaderless("export", "runs/quickstart-imitation", "runs/quickstart-imitated")
    console.rule("[bold]4/4  reinforcement learning: the only signal is whether the right block was reached")
    leaderless("train", "recipes/quickstart/robot.yaml", "--workers", workers, "--fresh")
    first, *_, last = accuracies("quickstart-robot")
    console.rule()
    console.print(
        f"Success on {NUM_HELD_OUT} tables that were never seen: [bold]{first:.1%}[/] after imitation, "
        f"[bold green]{last:.1%}[/] after reinforcement learning. All took {(time.monotonic() - begin) / 60:.1f} "
        "minutes.\n"
        "Open [bold]runs/quickstart-robot/report.html[/] in a browser to watch the arm.",
        highlight=False,
    )


def write_tasks(folder: Path) -> None:
    """Write tasks to train on, each with a start that follows from its place in the run, and held-out ones."""
    folder.mkdir(parents=True)
    train = [json.dumps({"task": number}) for number in range(NUM_TASKS)]
    held_out = [json.dumps({"task": number, "seed": 1_000_000 + number}) for number in range(NUM_HELD_OUT)]
    for name, lines in {"train": train, "test": held_out}.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
