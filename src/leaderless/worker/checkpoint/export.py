"""Exports a checkpoint's model in a form that other software loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from leaderless.base.named_functions import load_own
from leaderless.config import RecipeError
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.decoder import class_for, keep_description, save_description
from leaderless.models.loading.saved_buffers import FILE, KEY, saved_buffers
from leaderless.models.lora.linear import merge_adapters, write_adapters
from leaderless.models.value_model import load_value_model
from leaderless.planner.graph.adapters import CONFIG_FILE, described
from leaderless.worker.checkpoint.reader import read_role_state, read_state
from leaderless.worker.checkpoint.shards import DamagedCheckpointError, Manifest, read_tensors, stored_shapes

Writer = Callable[[Path, Path], None]
"""Function that writes the model of a checkpoint's folder into another one."""
WRITERS: Mapping[str, str] = {"leaderless_body": "leaderless.embodied.policies.loading:write_model"}
"""Functions that write models which `transformers` does not know, by the `model_type` of their `config.json`."""


def export_model(checkpoint: Path, role: str, out: Path, *, merge: bool = False) -> Path:
    """Join a role's shards and write a folder that other software loads; returns the folder.

    Args:
        checkpoint: Checkpoint.
        role: Role whose model is written in the format of Hugging Face, or whose adapters in the format of
            `peft`.
        out: Folder, which may exist if it is empty.
        merge: Whether to merge adapters into the weights of their model and write the result.

    Raises:
        RecipeError: The checkpoint has no such role, or no adapters to merge; `out` is not empty; or the adapters'
            model cannot be loaded.
    """
    read_state(checkpoint)
    try:
        manifest = Manifest.read(checkpoint)
        manifest.check(checkpoint, [name for name in manifest.files if name.startswith(f"{role}/")])
    except DamagedCheckpointError as error:
        raise RecipeError.at("", f"checkpoint {checkpoint} is damaged: {error}; take another one") from error
    source, state = checkpoint / role, read_role_state(checkpoint, role)
    own_writer = _writer_of(source)
    if state is None:
        roles = ", ".join(sorted(path.name for path in checkpoint.iterdir() if path.is_dir()))
        raise RecipeError.at("", f"checkpoint {checkpoint} has no role '{role}' (there are: {roles})")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError.at("", f"{'folder' if out.is_dir() else 'file'} {out} is not empty: name another one")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if (source / CONFIG_FILE).exists():
        _write_adapted(source, role, partial, merge=merge, is_critic=state.is_value_model)
    elif merge:
        raise RecipeError.at("--merge", f"role '{role}' of checkpoint {checkpoint} has no adapters: leave it out")
    elif own_writer is not None:
        own_writer(source, partial)
    else:
        _write_whole(source, partial, is_critic=state.is_value_model)
    if own_writer is None:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if state.is_value_model and _is_reward_model(source):
            tokenizer.pad_token = padding_of(tokenizer)[0]
        tokenizer.save_pretrained(partial)
    for file in source.glob("preprocessor_config.json"):
        shutil.copy(file, partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return out


def _writer_of(source: Path) -> Writer | None:
    """The function that writes the model of a folder, if `transformers` does not know it."""
    try:
        about = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = WRITERS.get(str(about.get("model_type"))) if isinstance(about, dict) else None
    return None if name is None else cast("Writer", load_own(name))


def _write_whole(source: Path, out: Path, *, is_critic: bool) -> None:
    """Write a model whose weights are all in a checkpoint."""
    if is_critic and _is_reward_model(source):
        model = _empty_classifier(source)
    else:
        auto_class = AutoModelForTokenClassification if is_critic else AutoModelForCausalLM
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        model = _empty_model(class_for(config, auto_class, "models"), config)
        keep_description(model, config, auto_class)
        _part(model, stored_shapes(source))
    read_tensors(source, {f"weights.{name}": one.detach() for name, one in model.named_parameters()})
    buffers = saved_buffers(model)
    if buffers and not (source / FILE).exists():
        raise RecipeError.at(
            "",
            f"checkpoint {source.parent} lacks {min(buffers)}, which is no trained weight: it was written by an older "
            "version; train a step more from it, and take the checkpoint of that",
        )
    read_tensors(source, {KEY.format(name): one for name, one in buffers.items()})
    if (source / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.save_pretrained(out)
    save_description(model, out)


def _part(model: PreTrainedModel, stored: Container[str]) -> None:
    """Give weights that a checkpoint has apart a place each, such as a head that is described as the embedding."""
    for name in [*model.all_tied_weights_keys]:
        if f"weights.{name}" in stored:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, nn.Parameter(torch.empty_like(model.get_parameter(name))))
            del model.all_tied_weights_keys[name]
            model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _is_reward_model(source: Path) -> bool:
    """Whether a folder describes a model that scores whole sequences."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _empty_classifier(source: Path) -> PreTrainedModel:
    """The sequence classifier that a folder describes, without values."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    padding = padding_of(AutoTokenizer.from_pretrained(source, trust_remote_code=False))[1]
    config.pad_token_id = config.get_text_config().pad_token_id = padding
    return _empty_model(class_for(config, AutoModelForSequenceClassification, "models"), config)


def padding_of(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int] | tuple[None, None]:
    """A token that pads sequences, and its id; None without one.

    A sequence classifier scores the last token that is not padding, so padding must differ from the end of a sequence.
    """
    for token in (tokenizer.pad_token, tokenizer.unk_token):
        if token is not None and token != tokenizer.eos_token:
            return token, int(tokenizer.convert_tokens_to_ids(token))
    return None, None


def _write_adapted(source: Path, role: str, out: Path, *, merge: bool, is_critic: bool) -> None:
    """Write the adapters of a model, or the model with its adapters merged."""
    if is_critic and not merge:
        raise RecipeError.at("--role", f"'{role}' is a value model, whose head is no adapter: pass --merge")
    config = described(source, f"models.{role}")
    model = (load_value_model if is_critic else load_causal_lm)(config, role)
    weights = {name: one.detach() for name, one in model.trained_weights()}
    read_tensors(source, {f"weights.{name}": one for name, one in weights.items()})
    if merge:
        merge_adapters(model.model)
        whole = model.model
        if is_critic and _is_reward_model(source):
            own, whole = dict(whole.named_parameters()), _empty_classifier(source)
            for name, weight in whole.named_parameters():
                weight.data = own[name].data
        whole.save_pretrained(out)
        save_description(whole, out)
    else:
        assert config.lora is not None
        write_adapters(out, weights, config)


def _empty_model(auto_class: type[AutoModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model whose parameters have memory but no values; tied parameters share theirs."""
    with torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    if model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        made: PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
        return made  # buffers still have to be computed
    model.to_empty(device="cpu")
    model.tie_weights()
    return model
