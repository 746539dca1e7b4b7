"""From random weights to a language model improved by reinforcement learning, on the CPU, in a few minutes.

It runs the commands that a person would type, from the root of the repository:

    python examples/quickstart/prepare.py
    leaderless train recipes/quickstart/sft.yaml --workers 2
    leaderless export runs/quickstart-sft runs/quickstart-base
    leaderless train recipes/quickstart/grpo.yaml --workers 2
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from leaderless.observability.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "runs"
console = Console()


def main() -> None:
    """Prepare, imitate, export, reinforce, and print the result."""
    begin = time.monotonic()
    workers = str(min(2, len(os.sched_getaffinity(0))))
    console.rule("[bold]1/4  a tiny Qwen2 model with random weights, and additions to learn")
    for name in ("quickstart-data", "quickstart-base"):
        shutil.rmtree(RUNS / name, ignore_errors=True)
    run(str(ROOT / "examples/quickstart/prepare.py"))
    console.rule("[bold]2/4  supervised fine-tuning, until about half of the answers are right")
    leaderless("train", "recipes/quickstart/sft.yaml", "--workers", workers, "--fresh")
    console.rule("[bold]3/4  the result as a Hugging Face folder")
    leaderless("export", "runs/quickstart-sft", "runs/quickstart-base")
    console.rule("[bold]4/4  reinforcement learning: the only signal is right or wrong")
    leaderless("train", "recipes/quickstart/grpo.yaml", "--workers", workers, "--fresh")
    first, *_, last = accuracies()
    console.rule()
    console.print(
        f"Accuracy on {held_out()} held-out additions: [bold]{first:.1%}[/] before reinforcement learning, "
        f"[bold green]{last:.1%}[/] after it. All took {(time.monotonic() - begin) / 60:.1f} minutes.\n"
        "Open [bold]runs/quickstart/report.html[/] in a browser to see why.",
        highlight=False,
    )


def leaderless(*arguments: str) -> None:
    """Print and run a command."""
    console.print(f"[dim]$ leaderless {' '.join(arguments)}", highlight=False)
    run("-m", "leaderless", *arguments)


def run(*arguments: str) -> None:
    """Run Python, and exit if it fails; it has printed the reason."""
    code = subprocess.run([sys.executable, *arguments], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def accuracies(run: str = "quickstart") -> list[float]:
    """Held-out accuracy of a run, each time it was measured."""
    records = RunDirectory(RUNS / run).read_metrics()
    return [record["evaluation/mean@1"] for record in records if "evaluation/mean@1" in record]


def held_out() -> int:
    """Number of held-out questions."""
    lines = (RUNS / "quickstart-data/test.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(1 for line in lines if json.loads(line))


if __name__ == "__main__":
    main()
