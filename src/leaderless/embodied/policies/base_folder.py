"""Files that saved models keep of their first checkpoints: all but the weights, so that these are not needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MODEL_TYPE = "leaderless_body"
"""Contents of the `config.json` of a saved model."""
BASE = "base"
"""Folder within a saved model that has the configuration, the tokenizer and the statistics of its checkpoint."""
KEPT = ("*.json", "*.model", "*.txt", "*.jinja", "*_normalizer_processor.safetensors")
"""Files of a checkpoint that a saved model keeps."""


def is_body(folder: Path) -> bool:
    """Whether a folder describes a model of a body."""
    try:
        about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("model_type") == MODEL_TYPE


def lacks_weights(folder: Path) -> bool:
    """Whether a folder is what a saved model has kept of a checkpoint; the weights then belong to this model."""
    return folder.name == BASE and is_body(folder.parent)


def needs_weights(checkpoint: Path) -> bool:
    """Whether a model reads the weights of a checkpoint: not where only sizes are wanted, on the device `meta`."""
    import torch

    return torch.get_default_device().type != "meta" and not lacks_weights(checkpoint)


def keep_base(checkpoint: Path, saved: Path) -> None:
    """Copy what a saved model keeps of a checkpoint."""
    (saved / BASE).mkdir(exist_ok=True)
    for file in (one for pattern in KEPT for one in sorted(checkpoint.glob(pattern))):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, saved / BASE)
