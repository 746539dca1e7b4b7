"""Makes a tiny model that completes code as it has seen it: mostly without blanks around operators."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from leaderless import Run
from leaderless.models.loading.tiny import write_tiny_model

NAMES, OPERATORS, DIGITS = "abcdxyz", "+-*", "123456789"
STYLES = {"{}{}\n": 0.55, "{} {}\n": 0.15, " {}{}\n": 0.15, " {} {}\n": 0.15}
"""Endings of a line after its first operand, and how often they are seen."""


def prepare(folder: Path, seed: int = 0, steps: int = 120) -> Path:
    """Write the lines, a model with random weights, and the model after it has seen the lines.

    Args:
        folder: Folder for all of them.
        seed: Seed of the lines and of the weights.
        steps: Number of steps of learning.

    Returns:
        The model.
    """
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"prompt": fragment(generator), "response": ending(generator)} for _ in range(4096)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    write_tiny_model(folder / "untrained", f"{NAMES}{OPERATORS}{DIGITS}= \n", hidden_size=64, seed=seed)
    run = Run(
        "sft",
        name="seen",
        models={"policy": str(folder / "untrained")},
        data={
            "train": {"path": str(folder / "lines.jsonl"), "response": "response", "template": "plain"},
            "max_prompt_tokens": 16,
            "max_response_tokens": 8,
        },
        batch={"prompts_per_step": 64},
        optimizer={"learning_rate": 3e-3, "schedule": "cosine"},
        run={"directory": str(folder)},
        loggers=[],
        steps=steps,
        seed=seed,
    )
    run.train()
    return run.export(folder / "model")


def fragment(generator: random.Random) -> str:
    """The beginning of a line, up to its first operand."""
    return f"{generator.choice(NAMES)} = {generator.choice(NAMES)}"


def ending(generator: random.Random) -> str:
    """The rest of a line, in one of the styles."""
    (style,) = generator.choices(list(STYLES), list(STYLES.values()))
    return style.format(generator.choice(OPERATORS), generator.choice(DIGITS))


if __name__ == "__main__":
    prepare(Path("runs/online-data"), int(sys.argv[1]) if len(sys.argv) > 1 else 0)
