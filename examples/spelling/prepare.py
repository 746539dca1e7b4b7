"""Makes a tiny untrained model, words of reasoning-gym to spell backward, and demonstrations of an unsure teacher.

The teacher spells well, but puts a question mark behind seven answers of ten, which are then not right. Reinforcement
learning finds that out from the package's score.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from random import Random

from leaderless.base.values import Json
from leaderless.environments.adapters.reasoning_gym_tasks import make_rows
from leaderless.models.loading.tiny import write_tiny_model

QUESTION = "Spell this word backward (example: sun -> nus): "
NUM_SHOWN, NUM_TASKS, NUM_HELD_OUT = 20_000, 20_000, 256
LENGTHS = {"min_word_len": 3, "max_word_len": 5}
DOUBTS = 0.7
"""Share of answers with a question mark."""
SEEDS_APART = 1 << 24
"""Distance of the seeds of datasets: reasoning-gym adds a task's number to the seed, so that near seeds share tasks."""


def prepare(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `demonstrations.jsonl`, `train.jsonl` and `test.jsonl`.

    Args:
        folder: Folder to write into.
        seed: Seed of the model's weights and the tasks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    characters = string.ascii_letters + string.digits + "?"
    write_tiny_model(folder / "model", characters, hidden_size=64, num_layers=2, words=[QUESTION], seed=seed)
    generator = Random(seed)
    shown = [demonstrated(row, generator) for row in words(NUM_SHOWN, 3 * seed)]
    train = words(NUM_TASKS, 3 * seed + 1)
    known = {row["question"] for row in (*shown, *train)}
    test = [row for row in words(20 * NUM_HELD_OUT, 3 * seed + 2) if row["question"] not in known]
    for name, rows in (("demonstrations", shown), ("train", train), ("test", test[:NUM_HELD_OUT])):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def demonstrated(row: Mapping[str, Json], generator: Random) -> dict[str, Json]:
    """A question with the teacher's answer.

    Args:
        row: Task.
        generator: Random numbers.
    """
    return {"question": row["question"], "answer": f"{row['answer']}{'?' * (generator.random() < DOUBTS)}"}


def words(count: int, number: int) -> list[dict[str, Json]]:
    """Tasks with words of three to five letters.

    Args:
        count: Number of tasks.
        number: Number of the dataset; different datasets have different tasks.
    """
    return list(make_rows("spell_backward", count, seed=number * SEEDS_APART, **LENGTHS))


if __name__ == "__main__":
    prepare(Path("runs/spelling-data"))
