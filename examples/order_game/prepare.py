"""Makes the models and the tasks of the order game: a planner that knows nothing, and a solver that can compute."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from examples.signal_game.prepare import make_plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.models.loading.tiny import write_tiny_model

NUM_EPOCHS, LEARNING_RATE, GOOD_LOSS = 400, 3e-3, 0.1
Row = dict[str, str]


def tasks() -> list[Row]:
    """All expressions k*m+c and k*(m+c) of some small numbers."""
    numbers = [(k, m, c) for k in (2, 3) for m in (1, 2, 3) for c in (1, 2)]
    rows = [(f"{k}*{m}+{c}", f"{k} {m} {c}", "*", k * m + c) for k, m, c in numbers]
    rows += [(f"{k}*({m}+{c})", f"{k} {m} {c}", "+", k * (m + c)) for k, m, c in numbers]
    names = ("expression", "numbers", "first", "result")
    return [dict(zip(names, map(str, row), strict=True)) for row in rows]


def prepare(folder: Path, seed: int = 0) -> Path:
    """Write a model for each role, and `tasks.jsonl`.

    Args:
        folder: Folder to write into.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = tasks()
    results = sorted({row["result"] for row in rows if len(row["result"]) > 1})
    for number, role in enumerate(("planner", "solver")):
        write_tiny_model(
            folder / role,
            "0123456789*+()? ",
            hidden_size=64,
            num_heads=4,
            max_positions=32,
            words=results,
            is_tied=False,
            seed=2 * seed + number,
        )
        make_plain(folder / role)
    teach(folder / "solver", rows)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def teach(path: Path, rows: list[Row]) -> None:
    """Let a model compute what it is told to."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    asked = torch.tensor([tokenizer.encode(f"{row['numbers']} {row['first']}") for row in rows])
    results = torch.tensor([tokenizer.encode(row["result"]) for row in rows])[:, 0]
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    for _ in range(NUM_EPOCHS):
        loss = torch.nn.functional.cross_entropy(model(asked).logits[:, -1], results)
        if loss.item() < GOOD_LOSS:
            break
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(path)


if __name__ == "__main__":
    prepare(Path("runs/order"), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
