"""An arm that learns to reach for the block that it is asked for, on the CPU, in a few minutes."""

from __future__ import annotations

import json
from pathlib import Path

from leaderless.cli.quickstart_project.commands import Show

NUM_TASKS, NUM_HELD_OUT = 4096, 512
NUM_DEMONSTRATIONS = 40


def show_robot(show: Show) -> None:
    """Record, imitate, export, reinforce, and print the result.

    Args:
        show: Folder and terminal of the demonstration.
    """
    show.clear("quickstart-demonstrations", "quickstart-imitated", "quickstart-tasks")
    write_tasks(show.runs / "quickstart-tasks")
    show.say(f"1/4  demonstrations: a script reaches for blocks {NUM_DEMONSTRATIONS} times")
    imitation = "recipes/quickstart/robot_imitation.yaml"
    episodes = ("--episodes", str(NUM_DEMONSTRATIONS))
    show.command("demonstrate", imitation, "runs/quickstart-demonstrations", *episodes)
    show.say("2/4  imitation, by a policy that sees the table and reads what to do")
    show.train(imitation)
    show.say("3/4  the policy as a folder")
    show.command("export", "runs/quickstart-imitation", "runs/quickstart-imitated")
    show.say("4/4  reinforcement learning: the only signal is whether the right block was reached")
    show.train("recipes/quickstart/robot.yaml")
    show.result("quickstart-robot", f"Success on {NUM_HELD_OUT} tables that were never seen", "to watch the arm")


def write_tasks(folder: Path) -> None:
    """Write tasks to train on, each with a start that follows from its place in the run, and held-out ones.

    Args:
        folder: Folder to write, which must not exist.
    """
    folder.mkdir(parents=True)
    train = [json.dumps({"task": number}) for number in range(NUM_TASKS)]
    held_out = [json.dumps({"task": number, "seed": 1_000_000 + number}) for number in range(NUM_HELD_OUT)]
    for name, lines in {"train": train, "test": held_out}.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
