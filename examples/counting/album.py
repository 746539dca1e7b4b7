"""An album of pictures that a model leafs through: each turn shows one, and asks how many squares have a color."""

from __future__ import annotations

from random import Random

from examples.counting.prepare import make_row

from leaderless import Environment, Turn


class Album(Environment):
    """Shows one picture a turn, the first of them from the dataset, and rewards each number that is right.

    A picture comes with its question; nothing in the text tells the answer, so that only a model that looks at each
    of them does better than by guessing.
    """

    def __init__(self, num_pictures: int = 2) -> None:
        """Show some pictures.

        Args:
            num_pictures: Number of pictures, and of turns.
        """
        self.num_pictures = num_pictures

    def reset(self, task: dict[str, str], rng: Random) -> list[dict[str, object]]:
        """Show the picture of the dataset."""
        self.rng, self.num_shown = rng, 0
        return self._shown(task)

    def act(self, text: str) -> Turn:
        """Compare a number, and show the next picture."""
        reward = float(text.strip() == self.answer) / self.num_pictures
        if self.num_shown == self.num_pictures:
            return Turn(reward=reward, done=True)
        return Turn(self._shown(make_row(self.rng)), reward)

    def _shown(self, row: dict[str, str]) -> list[dict[str, object]]:
        """A picture and its question as a message."""
        self.num_shown, self.answer = self.num_shown + 1, row["answer"]
        question = row["question"].removeprefix("<image>")
        parts = [{"type": "image", "image": row["image"]}, {"type": "text", "text": question}]
        return [{"role": "user", "content": parts}]
