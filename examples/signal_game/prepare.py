"""Makes the models and the tasks of the signal game: two tiny untrained policies, a critic, and eight digits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from leaderless.models.loading.tiny import write_tiny_model

DIGITS = "01234567"
ROLES = ("planner", "solver", "critic")
NUM_TASKS = 64


def prepare(folder: Path, seed: int = 0) -> Path:
    """Write a model for each role, and `digits.jsonl`.

    Args:
        folder: Folder to write into.
        seed: Seed of the weights.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, role in enumerate(ROLES):
        write_tiny_model(
            folder / role,
            DIGITS,
            hidden_size=64,
            num_layers=1,
            num_heads=2,
            max_positions=16,
            is_tied=False,
            seed=seed * len(ROLES) + number,
        )
        make_plain(folder / role)
    rows = [{"digit": DIGITS[place % len(DIGITS)]} for place in range(NUM_TASKS)]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def make_plain(path: Path) -> None:
    """Let a model say everything with about the same probability, and tell its inputs apart well.

    Without this, random weights give some symbols a meaning before anything has been learned.
    """
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 2:
                weights.mul_(weights.shape[1] ** 0.5 if "embed_tokens" in name else 0.1)
    model.save_pretrained(path)


if __name__ == "__main__":
    prepare(Path("runs/signal"), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
