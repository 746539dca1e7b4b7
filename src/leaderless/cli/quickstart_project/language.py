"""From random weights to a language model improved by reinforcement learning, on the CPU, in a few minutes."""

from __future__ import annotations

from leaderless.cli.quickstart_project.commands import Show


def show_language(show: Show) -> None:
    """Prepare, imitate, export, reinforce, and print the result.

    Args:
        show: Folder and terminal of the demonstration.
    """
    from leaderless.cli.quickstart_project.additions import NUM_HELD_OUT, prepare

    show.say("1/4  a tiny Qwen2 model with random weights, and additions to learn")
    show.clear("quickstart-data", "quickstart-base")
    prepare(show.runs / "quickstart-data")
    show.say("2/4  supervised fine-tuning, until about half of the answers are right")
    show.train("recipes/quickstart/sft.yaml")
    show.say("3/4  the result as a Hugging Face folder")
    show.command("export", "runs/quickstart-sft", "runs/quickstart-base")
    show.say("4/4  reinforcement learning: the only signal is right or wrong")
    show.train("recipes/quickstart/grpo.yaml")
    show.result("quickstart", f"Accuracy on {NUM_HELD_OUT} held-out additions", "to see why")
