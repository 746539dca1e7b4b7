"""Exports a checkpoint's model in the form that other software loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from leaderless.checkpoint.manifest import DamagedCheckpointError, Manifest
from leaderless.checkpoint.reader import read_role_state, read_state
from leaderless.checkpoint.shards import read_tensors
from leaderless.config import RecipeError


def export_model(checkpoint: Path, role: str, out: Path) -> Path:
    """Join the shards of a role and write a Hugging Face folder, which may exist if it is empty; returns the folder.

    Raises:
        RecipeError: The checkpoint has no such role, or `out` holds something.
    """
    read_state(checkpoint)
    try:
        manifest = Manifest.read(checkpoint)
        manifest.check(checkpoint, [name for name in manifest.files if name.startswith(f"{role}/")])
    except DamagedCheckpointError as error:
        raise RecipeError.at("", f"checkpoint {checkpoint} is damaged: {error}; take another one") from error
    source, state = checkpoint / role, read_role_state(checkpoint, role)
    if state is None:
        roles = ", ".join(sorted(path.name for path in checkpoint.iterdir() if path.is_dir()))
        raise RecipeError.at("", f"checkpoint {checkpoint} has no role '{role}' (there are: {roles})")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError.at("", f"{'folder' if out.is_dir() else 'file'} {out} is not empty: name another one")
    auto_class = AutoModelForTokenClassification if state.is_value_model else AutoModelForCausalLM
    model = _empty_model(auto_class, AutoConfig.from_pretrained(source, trust_remote_code=False))
    weights = {f"weights.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    read_tensors(source, weights)
    if (source / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(source)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return out


def _empty_model(auto_class: type[AutoModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose parameters have memory but no values; tied ones have it once."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    if model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        made: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
        return made  # some values are no parameters, and have to be computed
    model.to_empty(device="cpu")
    model.tie_weights()
    return model
