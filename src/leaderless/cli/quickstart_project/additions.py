"""Makes the model and the data of the quickstart: a tiny untrained Qwen2 with its tokenizer, and additions to learn.

The demonstrations come from a careless teacher, who forgets the hundreds of most sums that have them. A model that
imitates the teacher gets about half of its sums right. Only the reward uses the right answers: reinforcement learning
learns from nothing but whether an answer was right.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from leaderless.models.loading.tiny import write_tiny_model

NUM_HELD_OUT = 512
CARELESSNESS = 0.75
DEMONSTRATIONS_PER_QUESTION = 4


def prepare(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `demonstrations.jsonl`, `train.jsonl` and `test.jsonl`.

    No question of `test.jsonl` is in another file.

    Args:
        folder: Folder to write into.
        seed: Seed of the model's weights, the order of the questions and the teacher's mistakes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model", "0123456789+=", hidden_size=128, num_layers=2, seed=seed)
    generator = random.Random(seed)  # noqa: S311 - no secret
    numbers = range(10, 100)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers]
    generator.shuffle(rows)
    test, train = rows[:NUM_HELD_OUT], rows[NUM_HELD_OUT:]
    shown = [demonstrate(row, generator) for row in train for _ in range(DEMONSTRATIONS_PER_QUESTION)]
    for name, content in (("test", test), ("train", train), ("demonstrations", shown)):
        write_rows(folder / f"{name}.jsonl", content)


def demonstrate(row: dict[str, str], generator: random.Random) -> dict[str, str]:
    """The demonstration of the teacher for a question.

    Args:
        row: Question with its answer.
        generator: Random numbers that decide whether the teacher is careless.
    """
    is_careless = generator.random() < CARELESSNESS
    written = int(row["answer"]) % 100 if is_careless else int(row["answer"])
    return {"question": row["question"], "response": str(written)}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSON-lines file.

    Args:
        path: File to write.
        rows: Content of each line.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
