"""Makes a tiny untrained model, and pairs of which the response with more letters `a` is preferred.

Nobody tells a model so: a reward model has to find it out from the pairs, and a policy from the reward model, or from
the pairs themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from leaderless.models.loading.tiny import write_tiny_model

LETTERS = "abcd"
NUM_PAIRS, NUM_HELD_OUT = 2000, 200
LENGTH = 5
"""Letters of a response."""


def prepare(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `pairs.jsonl`, `held_out.jsonl` and `prompts.jsonl`.

    Args:
        folder: Folder to write into.
        seed: Seed of the model's weights and the pairs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(folder / "model", LETTERS + ":", hidden_size=32, num_layers=1, seed=seed)
    generator = Random(seed)
    pairs = [_pair(generator) for _ in range(NUM_PAIRS + NUM_HELD_OUT)]
    _write(folder / "pairs.jsonl", pairs[:NUM_PAIRS])
    _write(folder / "held_out.jsonl", pairs[NUM_PAIRS:])
    _write(folder / "prompts.jsonl", [{"prompt": f"{letter}:"} for letter in LETTERS])


def _pair(generator: Random) -> dict[str, str]:
    """A prompt with two responses that differ in their number of letters `a`."""
    while True:
        responses = ["".join(generator.choices(LETTERS, k=LENGTH)) for _ in range(2)]
        first, second = sorted(responses, key=lambda text: -text.count("a"))
        if first.count("a") > second.count("a"):
            return {"prompt": f"{generator.choice(LETTERS)}:", "chosen": first, "rejected": second}


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    prepare(Path("runs/preferences"))
