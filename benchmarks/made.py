"""Random models and data, and runs with them, for benchmarks of everything but the mathematics."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,=+"


@dataclass(frozen=True)
class Size:
    """A Qwen2 with random weights."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int

    def config(self) -> Qwen2Config:
        """Its configuration, without tokens that end or fill up a text."""
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )


def prepare(folder: Path, hidden_size: int, num_layers: int, prompt_tokens: int) -> None:
    """Make a Qwen2 with random weights, and prompts of random letters.

    Args:
        folder: Folder in which `model` and `rows.jsonl` are written.
        hidden_size: Width of the model.
        num_layers: Number of layers.
        prompt_tokens: Length of each prompt; a token is a letter.
    """
    from leaderless.models.loading.tiny import write_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_model(
        folder / "model", CHARACTERS, hidden_size=hidden_size, num_layers=num_layers, num_heads=4, max_positions=2048
    )
    generator = random.Random(0)
    rows = [{"prompt": "".join(generator.choices(CHARACTERS, k=prompt_tokens)), "answer": "1"} for _ in range(2048)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train(folder: Path, name: str, settings: Sequence[str], num_workers: int) -> list[dict[str, float]]:
    """Train the model with GRPO, each worker on one core.

    Args:
        folder: Folder that `prepare` wrote.
        name: Name of the run.
        settings: Settings as on the command line.
        num_workers: Number of workers on this machine.

    Returns:
        Metrics of each step.
    """
    data = {"path": "rows.jsonl", "prompt": "prompt", "answer": "answer", "template": "plain"}
    recipe: dict[str, object] = {
        "name": name,
        "workflow": "grpo",
        "models": {"policy": "model"},
        "data": {"train": data, "max_prompt_tokens": 1024},
        "reward": {"exact_match": 1.0},
        "run": {"recorded_prompts": 0},
        "loggers": [],
        "steps": 1,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = ["-m", "leaderless", "train", f"{name}.yaml", *settings, "--workers", str(num_workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}; see {folder / name}.log")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
