"""Models of bodies in a checkpoint, written into a folder of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import save_file

from leaderless.embodied.policies.base_folder import BASE
from leaderless.embodied.policies.loading import empty_model
from leaderless.worker.checkpoint.shards import read_tensors


def write_model(source: Path, out: Path) -> None:
    """Write the model of a checkpoint's folder into another one, from which recipes can load it."""
    weights = {name: one.detach().contiguous() for name, one in empty_model(source).named_parameters()}
    read_tensors(source, {f"weights.{name}": one for name, one in weights.items()})
    save_file(weights, out / "model.safetensors")
    shutil.copy(source / "config.json", out)
    if (source / BASE).is_dir():
        shutil.copytree(source / BASE, out / BASE)
