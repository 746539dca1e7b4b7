"""Folders of adapters in the format of `peft`: what they say of themselves. Imports no torch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.config.roles import origin_of
from leaderless.planner.backends import backend_of

if TYPE_CHECKING:
    from leaderless.planner.parts import RoleInstance

PREFIX, SUFFIX = "base_model.model.", ".weight"
"""What `peft` puts before and after the names of matrices in its files."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "target_parameters": ([], None),
    "alora_invocation_tokens": ([], None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""What adapters can be here, by entries of their description. Other ways to begin, such as PiSSA, change the base."""


def lora_of(model: ModelConfig, key: str) -> LoraConfig | None:
    """The adapters of a model; those that begin with a folder are as it says.

    Args:
        model: Settings of the model.
        key: Key of these settings, for errors.

    Raises:
        RecipeError: The folder cannot be read, or its adapters cannot be trained here, or on this model.
    """
    lora = model.lora
    if lora is None or lora.adapter is None:
        return lora
    key = f"{key}.lora.adapter"
    path = Path(lora.adapter) / CONFIG_FILE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError.at(key, f"{path} cannot be read: {error}; name a folder that peft has saved") from error
    for name, allowed in PLAIN.items():
        if said.get(name) not in allowed:
            raise RecipeError.at(
                key,
                f"{path}: {name} is {said[name]}, but must be {allowed[0]} here: merge these adapters into their model "
                "with peft, and begin with the result",
            )
    base = said.get("base_model_name_or_path") or ""
    if base and Path(base).name != Path(model.path).name:
        raise RecipeError.at(
            key,
            f"{path}: the adapters are of the model '{base}', and not of '{model.path}'; if both are the same, correct "
            "base_model_name_or_path there",
        )
    if said.get("lora_dropout"):
        warnings.warn(
            f"{key}: these adapters were trained with a dropout of {said['lora_dropout']}, and are trained on without: "
            "the policy that is trained must be the one that sampled",
            stacklevel=2,
        )
    targets = said.get("target_modules")
    if isinstance(targets, str) or said.get("exclude_modules"):  # which layers a pattern means, the matrices say
        targets = _layers_in(Path(lora.adapter) / WEIGHTS_FILE, key)
    try:
        return LoraConfig(
            rank=said["r"], alpha=said["lora_alpha"], rslora=bool(said.get("use_rslora")), targets=sorted(targets)
        ).model_copy(update={"adapter": lora.adapter})
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError.at(key, f"{path} does not describe adapters: {error}") from error


def _layers_in(path: Path, key: str) -> list[str]:
    """The layers whose matrices a file of adapters has.

    Raises:
        RecipeError: It cannot be read.
    """
    try:
        with path.open("rb") as file:  # a length in 8 bytes, then a table in JSON, then the matrices
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, MemoryError) as error:
        raise RecipeError.at(key, f"{path} cannot be read: {error}") from error
    return sorted({name.removeprefix(PREFIX).partition(".lora_")[0] for name in table if ".lora_" in name})


def base_of(recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> RoleInstance | None:
    """The instance whose model, with its adapters off, is the model of another one; None for a model of its own.

    That is so for the reference of a role that trains adapters, where both are on the same ranks.
    """
    role = instance.role
    if role in recipe.models or instance.is_trained or instance.is_critic or instance.generates:
        return None
    origin = origin_of(role) or ""
    model = recipe.model_of(origin)
    if model is None or model.lora is None:
        return None
    found = (one for one in instances if one.role == origin and one.is_trained and not one.is_critic)
    return next((one for one in found if one.layout == instance.layout), None)


def donor_of(recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> RoleInstance | None:
    """The instance of another role whose weights this one uses under its own adapters; None if it has its own.

    Roles that train adapters on the same model, on the same ranks divided in the same way, have its weights once.
    """
    wanted = _frozen(recipe, instance)
    if wanted is None:
        return None
    first = next(one for one in instances if _frozen(recipe, one) == wanted)
    return None if first.role == instance.role else first


def _frozen(recipe: Recipe, instance: RoleInstance) -> tuple[object, ...] | None:
    """What instances have in common whose weights are the same all the time; None if they are not."""
    recipe, layout = recipe.as_seen_by(instance.role), instance.layout
    model = recipe.model_of(instance.role)
    if model is None or model.lora is None or instance.is_critic or layout.ep > 1:
        return None
    if not (instance.is_trained or instance.is_engine_only) or not backend_of(recipe.training.backend).lends_weights:
        return None
    own = model.model_copy(update={"lora": None, "gradient_checkpointing": False})
    return own, layout, instance.is_engine_only


def described(folder: Path, key: str) -> ModelConfig:
    """The model with adapters that a folder describes; see `describe`.

    Args:
        folder: Folder with the description.
        key: Key of the model's settings, for errors.

    Raises:
        RecipeError: The folder describes nothing that can be trained here.
    """
    said = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    base = ModelConfig(path=said["base_model_name_or_path"], revision=said.get("revision"))
    lora = lora_of(base.model_copy(update={"lora": LoraConfig(adapter=str(folder))}), key)
    assert lora is not None
    return base.model_copy(update={"lora": lora.model_copy(update={"adapter": None})})


def describe(model: ModelConfig, targets: Sequence[str]) -> dict[str, object]:
    """What `peft` has to know of a model's adapters, on the linear layers of some names."""
    lora = model.lora
    assert lora is not None, "only adapters are described"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "revision": model.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": [*targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
