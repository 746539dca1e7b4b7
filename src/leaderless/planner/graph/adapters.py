"""Folders of adapters in the format of `peft`: what they say of themselves. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig, origin_of
from leaderless.planner.engines import backend_of, engine_for

if TYPE_CHECKING:
    from leaderless.planner.plan_parts import RoleInstance

PREFIX, SUFFIX = "base_model.model.", ".weight"
"""Texts that `peft` puts before and after the names of matrices in its files."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
A, B = "lora_A", "lora_B"
"""Names of the two matrices of an adapter, as `peft` calls them."""
EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
"""Weights of all experts of a layer, in the order in which `peft` puts adapters around them."""
PLAIN: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "layers_to_transform": ([], None),
    "alora_invocation_tokens": ([], None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Supported values in the description of adapters, by name. Other ways to begin, such as PiSSA, change the base."""


def lora_of(model: ModelConfig, key: str) -> LoraConfig | None:
    """The adapters of a model; those that begin with a folder are as it says.

    Raises:
        RecipeError: The folder cannot be read, or its adapters cannot be trained here, or on this model; the error is
            at the model's key.
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
    expert_rank = _expert_rank(said, path, key)
    targets = said.get("target_modules")
    if isinstance(targets, str) or said.get("exclude_modules"):  # which layers a pattern means, the matrices say
        targets = _layers_in(Path(lora.adapter) / WEIGHTS_FILE, key)
    try:
        dropout = lora.dropout if "dropout" in lora.model_fields_set else said.get("lora_dropout") or 0.0
        rslora = bool(said.get("use_rslora"))
        return LoraConfig(
            rank=said["r"],
            alpha=said["lora_alpha"],
            rslora=rslora,
            targets=sorted(targets),
            expert_rank=expert_rank,
            dropout=dropout,
        ).model_copy(update={name: getattr(lora, name) for name in ("adapter", "base_dtype", "base_block")})
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError.at(key, f"{path} does not describe adapters: {error}") from error


def _expert_rank(said: Mapping[str, object], path: Path, key: str) -> int | None:
    """The rank that a folder says adapters of experts have, all of them the same; None if they have none."""
    named, patterns = said.get("target_parameters") or [], said.get("rank_pattern") or {}
    assert isinstance(named, list)
    assert isinstance(patterns, dict)
    known = {form for name in EXPERT_WEIGHTS for form in (name, f"experts.{name}")}
    if named and {".".join(name.split(".")[-2:]) for name in named} - known:
        raise RecipeError.at(key, f"{path}: target_parameters is {named}, but can be only weights of experts here")
    if named and {name.rpartition(".")[2] for name in named} != {*EXPERT_WEIGHTS}:
        both = " and ".join(EXPERT_WEIGHTS)
        raise RecipeError.at(key, f"{path}: target_parameters is {named}, but must be both {both} here")
    examples = [f"model.layers.0.mlp.experts.{name}" for name in EXPERT_WEIGHTS] if named else []
    found = [
        {pattern: rank for pattern, rank in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name)}
        for name in examples
    ]
    ranks = {next(iter(own.values()), said.get("r")) for own in found}
    if patterns.keys() != {pattern for own in found for pattern in own} or len(ranks) > 1:
        raise RecipeError.at(
            key,
            f"{path}: rank_pattern is {patterns}, but only experts can have another rank here, all of them the same: "
            "merge these adapters into their model with peft, and begin with the result",
        )
    (rank,) = ranks or {None}
    return cast("int | None", rank)


def optimizer_of(recipe: Recipe, model: ModelConfig) -> OptimizerConfig:
    """The settings of the optimizer of a role, as it sees the recipe."""
    return recipe.optimizer if model.lora is None else recipe.optimizer.for_adapters()


def _layers_in(path: Path, key: str) -> list[str]:
    """The layers whose matrices a file of adapters has."""
    try:
        with path.open("rb") as file:  # a length in 8 bytes, then a table in JSON, then the matrices
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (OSError, ValueError, MemoryError) as error:
        raise RecipeError.at(key, f"{path} cannot be read: {error}") from error
    layers = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in table if ".lora_" in name}
    return sorted(name for name in layers if not name.removesuffix(".base_layer").endswith(".experts"))


def name_in_peft(name: str) -> str:
    """The name of a matrix as `peft` calls it, without what is put before and after all of them.

    It puts an adapter around the module of the experts for each weight, one around the other.
    """
    module, _, own = name.rpartition(".")
    for weight, inside in zip(EXPERT_WEIGHTS, (".base_layer", ""), strict=True):
        if own.startswith(f"{weight}_"):
            return f"{module}{inside}.{own.removeprefix(f'{weight}_')}"
    return name


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


def companions_of(recipe: Recipe, instances: Sequence[RoleInstance], instance: RoleInstance) -> list[RoleInstance]:
    """The instances whose adapters one engine outside of this package has, this one included; none if it has none.

    They train adapters on the same model, and generate with the same engine and settings, on the same ranks.
    """
    wanted = _served(recipe, instance)
    return [] if wanted is None else [one for one in instances if _served(recipe, one) == wanted]


_NO_MATTER = {"gradient_checkpointing": False, "offload_activations": False}
"""Settings that say nothing about which weights a model has."""


def _served(recipe: Recipe, instance: RoleInstance) -> tuple[object, ...] | None:
    """Common property of instances that generate with one engine; None if it adds no adapters."""
    seen = recipe.as_seen_by(instance.role)
    model, spec = seen.model_of(instance.role), engine_for(seen.rollout, instance.engine)
    if model is None or model.lora is None or instance.is_critic or not instance.generates:
        return None
    if not (spec.keeps_weights and spec.takes_adapters):
        return None
    own = model.model_copy(update={"lora": None, **_NO_MATTER})
    size = seen.rollout.max_sequences, seen.longest_text()
    return instance.engine, own, instance.serving_layout, instance.is_engine_only, seen.rollout.external, size


def _frozen(recipe: Recipe, instance: RoleInstance) -> tuple[object, ...] | None:
    """Common property of instances whose weights are always the same; None if they are not."""
    recipe, layout = recipe.as_seen_by(instance.role), instance.layout
    model = recipe.model_of(instance.role)
    if model is None or model.lora is None or instance.is_critic or layout.ep > 1:
        return None
    if not (instance.is_trained or instance.is_engine_only) or not backend_of(recipe.training.backend).lends_weights:
        return None
    own = model.model_copy(update={"lora": None, **_NO_MATTER})
    return own, model.lora.packed_block, layout, instance.is_engine_only


def described(folder: Path, key: str) -> ModelConfig:
    """The model with adapters that a folder describes; see `describe`. Errors are at the model's key.

    Its weights are in float32, also if those under the adapters had 4 bits while they were trained.
    """
    said = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    base = ModelConfig(path=said["base_model_name_or_path"], revision=said.get("revision"))
    lora = lora_of(base.model_copy(update={"lora": LoraConfig(adapter=str(folder))}), key)
    assert lora is not None
    return base.model_copy(update={"lora": lora.model_copy(update={"adapter": None})})


def describe(model: ModelConfig, targets: Sequence[str], expert_rank: int | None = None) -> dict[str, object]:
    """Settings for `peft` of a model's adapters, on the linear layers of some names, and on experts with a rank."""
    lora = model.lora
    assert lora is not None, "only adapters are described"
    experts = [] if expert_rank is None else [f"experts.{name}" for name in EXPERT_WEIGHTS]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "revision": model.revision,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": [*targets],
        "target_parameters": experts or None,
        "rank_pattern": dict.fromkeys(experts, expert_rank),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        **({"base_dtype": lora.base_dtype, "base_block": lora.base_block} if lora.packed_block else {}),
    }
