"""Runs the commands of a demonstration, which are those that a person would type. Imports no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from leaderless.observability.console import console
from leaderless.observability.run_directory import RunDirectory


class CommandError(Exception):
    """A command of a demonstration has failed, and has printed the reason.

    Attributes:
        code: Exit code of the command.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"a command ended with exit code {code}")
        self.code = code


@dataclass(frozen=True)
class Show:
    """Folder and terminal of a demonstration.

    Attributes:
        folder: Folder in which the commands run; recipes write to `runs` in it.
        workers: Number of workers that train.
        overrides: Settings of every training, as `section.key=value`.
        begin: Time at which it has begun, of the monotonic clock.
    """

    folder: Path
    workers: int
    overrides: Sequence[str] = ()
    begin: float = field(default_factory=time.monotonic)

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

    def train(self, recipe: str) -> None:
        """Train a recipe from its beginning."""
        self.command("train", recipe, "--workers", str(self.workers), "--fresh", *self.overrides)

    def command(self, *arguments: str) -> None:
        """Print and run a command of this package.

        Raises:
            CommandError: It has failed.
        """
        console.print(f"[dim]$ leaderless {' '.join(arguments)}", highlight=False, soft_wrap=True)
        command = [sys.executable, "-m", "leaderless", *arguments]
        code = subprocess.run(command, cwd=self.folder, check=False).returncode  # noqa: S603 - this package itself
        if code:
            raise CommandError(code if code > 0 else 128 - code)

    def accuracies(self, run: str) -> list[float]:
        """Held-out accuracy of a run, each time it was measured."""
        records = RunDirectory(self.runs / run).read_metrics()
        return [record["evaluation/mean@1"] for record in records if "evaluation/mean@1" in record]

    def result(self, run: str, measure: str, purpose: str) -> None:
        """Print what reinforcement learning has changed.

        Args:
            run: Name of its run.
            measure: Measure of held-out rows, and what they are.
            purpose: Purpose for which a reader opens the report.
        """
        measured = self.accuracies(run)
        found = "Nothing was measured on held-out rows, as evaluation.every_steps says."
        if measured:
            found = (
                f"{measure}: [bold]{measured[0]:.1%}[/] before reinforcement learning, "
                f"[bold green]{measured[-1]:.1%}[/] after it."
            )
        console.rule()
        console.print(f"{found} All took {(time.monotonic() - self.begin) / 60:.1f} minutes.", highlight=False)
        console.print(f"Open [bold]runs/{run}/report.html[/] in a browser {purpose}.", highlight=False)
