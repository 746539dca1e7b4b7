"""Custom tools: a digit that the policy can only know if it calls a tool."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from leaderless import Environment, Turn, tool
from leaderless.environments.tools import Call, ToolCalls


class Hidden(Environment):
    """A digit to tell, which is hidden."""

    def reset(self, task: dict[str, int], rng: Random) -> str:  # noqa: ARG002
        """Hide a digit."""
        self.digit, self.has_looked = rng.randrange(10), False
        return "?"

    @tool
    def look(self, times: int = 1) -> str:
        """Look at the digit.

        Args:
            times: Number of repetitions.
        """
        self.has_looked = True
        return str(self.digit) * times

    def act(self, text: str) -> Turn:
        """Check the answer; guessing is no good."""
        is_right = self.has_looked and text == str(self.digit)
        return Turn(reward=float(is_right) - float(not self.has_looked), done=True)


def read_short(text: str) -> ToolCalls:
    """A format for a model that knows only a few characters: `L` looks, everything else is an answer."""
    return ToolCalls("", [Call("look")]) if text.startswith("L") else ToolCalls(text)


def prepare(folder: Path) -> None:
    """Write an untrained model that knows digits and letters, and tasks, which are only numbered.

    Args:
        folder: Folder to write into.
    """
    from leaderless.models.loading.tiny import write_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model", "0123456789?L", hidden_size=64)
    rows = ({"task": number} for number in range(1000))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path("runs/look-data"))
