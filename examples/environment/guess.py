"""A custom environment: the policy guesses a number, and is told whether it is smaller or larger."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from leaderless import Environment, Turn


class Guess(Environment):
    """A number to guess, from 0 to a largest one. Fewer guesses are better."""

    def __init__(self, largest: int = 9) -> None:
        self.largest = largest

    def reset(self, task: dict[str, int], rng: Random) -> str:  # noqa: ARG002
        """Think of a number."""
        self.number = rng.randint(0, self.largest)
        return "?"

    def act(self, text: str) -> Turn:
        """Answer a guess."""
        if not text.isdecimal():
            return Turn("!", reward=-0.5)
        if int(text) == self.number:
            return Turn(reward=1.0, done=True)
        return Turn("<" if self.number < int(text) else ">", reward=-0.1)


def prepare(folder: Path) -> None:
    """Write an untrained model that knows the digits, and tasks, which are only numbered.

    Args:
        folder: Folder to write into.
    """
    from leaderless.models.loading.tiny import write_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model", "0123456789?!<>", hidden_size=64)
    rows = ({"task": number} for number in range(1000))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path("runs/guess-data"))
