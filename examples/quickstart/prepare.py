"""Makes what the quickstart trains on: a tiny untrained Qwen2 model with its tokenizer, and additions to learn."""

from __future__ import annotations

import json
import random
from pathlib import Path

from leaderless.models.tiny import write_tiny_model

NUM_HELD_OUT = 512


def prepare(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `train.jsonl` and `test.jsonl`; no question of one file is in the other.

    Args:
        folder: To write into.
        seed: Of the model's weights and of the order of the questions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model", "0123456789+=", hidden_size=128, num_layers=2, seed=seed)
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(rows)
    write_rows(folder / "test.jsonl", rows[:NUM_HELD_OUT])
    write_rows(folder / "train.jsonl", rows[NUM_HELD_OUT:])


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSON-lines file.

    Args:
        path: The file.
        rows: One mapping each.
    """
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path("runs/quickstart-data"))
