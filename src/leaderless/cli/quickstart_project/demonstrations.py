"""The demonstrations of `leaderless quickstart`: commands that a person would type, in a row. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leaderless.cli.quickstart_project.data import (
    NUM_HELD_OUT,
    NUM_HELD_OUT_PROBLEMS,
    write_additions,
    write_tasks,
    write_word_problems,
)
from leaderless.observability.console import console
from leaderless.observability.run_directory import RunDirectory

NUM_DEMONSTRATIONS = 40


class CommandError(Exception):
    """A command of a demonstration has failed with this exit code, and has printed the reason."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a command ended with exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Show:
    """Folder and terminal of a demonstration."""

    folder: Path  # folder in which the commands run; recipes write to `runs` in it
    workers: int
    overrides: Sequence[str] = ()  # settings of every training, as `section.key=value`
    begin: float = field(default_factory=time.monotonic)  # time at which it has begun, of the monotonic clock

    @property
    def runs(self) -> Path:
        """Folder of all runs."""
        return self.folder / "runs"

    def say(self, text: str) -> None:
        """Print what comes next."""
        console.rule(f"[bold]{text}")

    def clear(self, *names: str) -> None:
        """Remove what an earlier demonstration has written."""
        for name in names:
            shutil.rmtree(self.runs / name, ignore_errors=True)

    def train(self, recipe: str, *settings: str) -> None:
        """Train a recipe from its beginning, with some settings."""
        self.command("train", recipe, "--workers", str(self.workers), "--fresh", *settings, *self.overrides)

    def command(self, *arguments: str) -> None:
        """Print and run a command of this package; a CommandError if it has failed."""
        console.print(f"[dim]$ leaderless {' '.join(arguments)}", highlight=False, soft_wrap=True)
        command = [sys.executable, "-m", "leaderless", *arguments]
        code = subprocess.run(command, cwd=self.folder, check=False).returncode  # noqa: S603 - this package itself
        if code:
            raise CommandError(code if code > 0 else 128 - code)

    def result(self, run: str, measure: str, purpose: str) -> None:
        """Print what a run has changed by a measure of held-out rows, and for which purpose to open its report."""
        name = "evaluation/mean@1"
        measured = [row[name] for row in RunDirectory(self.runs / run).read_metrics() if name in row]
        found = "Nothing was measured on held-out rows, as evaluation.every_steps says."
        if measured:
            found = (
                f"{measure}: [bold]{measured[0]:.1%}[/] before reinforcement learning, "
                f"[bold green]{measured[-1]:.1%}[/] after it."
            )
        console.rule()
        console.print(f"{found} All took {(time.monotonic() - self.begin) / 60:.1f} minutes.", highlight=False)
        console.print(f"Open [bold]runs/{run}/report.html[/] in a browser {purpose}.", highlight=False)


def show_language(show: Show) -> None:
    """From random weights to a language model that reinforcement learning improves: imitate, export, reinforce."""
    show.say("1/4  a tiny Qwen2 model with random weights, and additions to learn")
    show.clear("quickstart-data", "quickstart-base")
    write_additions(show.runs / "quickstart-data")
    show.say("2/4  supervised fine-tuning, until about half of the answers are right")
    show.train("recipes/quickstart/sft.yaml")
    show.say("3/4  the result as a Hugging Face folder")
    show.command("export", "runs/quickstart-sft", "runs/quickstart-base")
    show.say("4/4  reinforcement learning: the only signal is right or wrong")
    show.train("recipes/quickstart/grpo.yaml")
    show.result("quickstart", f"Accuracy on {NUM_HELD_OUT} held-out additions", "to see why")


def show_pretrained(show: Show, model: str) -> None:
    """A pretrained language model that learns to answer word problems: reinforce, and nothing else.

    Args:
        show: Folder and terminal.
        model: Folder or hub name of the model; empty for the one that the recipe names.
    """
    show.say("1/2  word problems: sums, differences and products, to be answered with a number only")
    write_word_problems(show.runs / "quickstart-problems")
    show.say("2/2  reinforcement learning: the only signal is right or wrong")
    show.train("recipes/quickstart/word_problems.yaml", *[f"models.policy.path={model}"] * bool(model))
    show.result("quickstart-real", f"Accuracy on {NUM_HELD_OUT_PROBLEMS} held-out problems", "to read what it answers")


def show_robot(show: Show) -> None:
    """An arm that learns to reach for the block that it is asked for: record, imitate, export, reinforce."""
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
