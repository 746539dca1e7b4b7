"""From random weights to a language model improved by reinforcement learning, on the CPU, in a few minutes."""

from __future__ import annotations

import time
from pathlib import Path

from leaderless.quickstart.commands import Show


def show_language(show: Show) -> None:
    """Prepare, imitate, export, reinforce, and print the result.

    Args:
        show: Folder and terminal of the demonstration.
    """
    from leaderless.quickstart.additions import prepare

    begin = time.monotonic()
    show.say("1/4  a tiny Qwen2 model with random weights, and additions to learn")
    show.clear("quickstart-data", "quickstart-base")
    prepare(show.runs / "quickstart-data")
    show.say("2/4  supervised fine-tuning, until about half of the answers are right")
    show.train("recipes/quickstart/sft.yaml")
    show.say("3/4  the result as a Hugging Face folder")
    show.command("export", "runs/quickstart-sft", "runs/quickstart-base")
    show.say("4/4  reinforcement learning: the only signal is right or wrong")
    show.train("recipes/quickstart/grpo.yaml")
    first, *_, last = show.accuracies("quickstart")
    show.result(
        f"Accuracy on {_num_lines(show.runs / 'quickstart-data/test.jsonl')} held-out additions: [bold]{first:.1%}[/] "
        f"before reinforcement learning, [bold green]{last:.1%}[/] after it.",
        time.monotonic() - begin,
        "Open [bold]runs/quickstart/report.html[/] in a browser to see why.",
    )


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
