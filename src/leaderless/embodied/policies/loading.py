"""Policies and critics as recipes name them: from a folder, or new."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from leaderless.base.named_functions import is_function_name, load_class
from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.config.environment import PolicyConfig
from leaderless.config.models import ModelConfig
from leaderless.embodied.policies.observations import StateNormalizer
from leaderless.embodied.policies.protocol import BodyModel, BodyPolicy, BodyValue
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces

MODEL_TYPE = "leaderless_body"
"""Contents of the `config.json` of a saved model."""
BASE = "base"
"""Folder within a saved model that has the configuration, the tokenizer and the statistics of its checkpoint."""
KEPT = ("*.json", "*.model", "*.txt", "*.jinja", "*_normalizer_processor.safetensors")
"""Files of a checkpoint that a saved model keeps."""

POLICIES: Mapping[str, str] = {
    "cnn": "leaderless.embodied.policies.cnn:Cnn",
    "film": "leaderless.embodied.policies.film:Film",
    "flow": "leaderless.embodied.policies.flow:SmallFlow",
    "groot": "leaderless.embodied.policies.groot_n15:Groot",
    "mlp": "leaderless.embodied.policies.mlp:Mlp",
    "openvla": "leaderless.embodied.policies.openvla:OpenVla",
    "openvla_oft": "leaderless.embodied.policies.openvla:OpenVlaOft",
    "pi0": "leaderless.embodied.policies.pi0:Pi0",
    "pi05": "leaderless.embodied.policies.pi05:Pi05",
    "squashed": "leaderless.embodied.policies.squashed:Squashed",
    "squashed_cnn": "leaderless.embodied.policies.squashed:SquashedCnn",
}
"""Policies that come with the package, each as `module:Class`."""
VALUES: Mapping[str, str] = {
    "cnn": "leaderless.embodied.policies.cnn:CnnValue",
    "film": "leaderless.embodied.policies.film:FilmValue",
    "flow": "leaderless.embodied.policies.flow:FlowValue",
    "groot": "leaderless.embodied.policies.groot_n15:GrootValue",
    "mlp": "leaderless.embodied.policies.mlp:MlpValue",
    "openvla": "leaderless.embodied.policies.openvla:OpenVlaValue",
    "openvla_oft": "leaderless.embodied.policies.openvla:OpenVlaValue",
    "pi0": "leaderless.embodied.policies.pi0:Pi0Value",
    "pi05": "leaderless.embodied.policies.pi05:Pi05Value",
}
"""Critics, likewise; they have the names of the policies that see in the same way."""


@dataclass(frozen=True)
class LoadedPolicy:
    """A model, and how to describe it.

    Attributes:
        model: The policy, or the critic.
        describe: Function that writes `config.json` into a folder.
    """

    model: BodyPolicy | BodyValue
    describe: Callable[[Path], None]


def open_model(config: ModelConfig, key: str, spaces: Spaces, *, is_critic: bool) -> LoadedPolicy:
    """Load a model from its folder, or make one with random weights, the same on every rank.

    A critic that begins with the folder of a policy sees as that policy does, with its weights where they are as large
    as one; the rest is new.

    Raises:
        RecipeError: It cannot be loaded or made, or is for a body of another kind. Errors name `key`.
    """
    model, kind, saved = _new(config, key, spaces, is_critic=is_critic)
    if saved:
        was_critic = bool(saved.get("is_critic"))
        names = {name: name for name, _ in model.named_parameters()}
        if isinstance(model, BodyValue) and not was_critic:
            names = {name: theirs for name in names if (theirs := model.name_in_policy(name)) is not None}
        _load(model, Path(config.path), key, names, is_whole=was_critic == is_critic)
    about: dict[str, Json] = {
        "model_type": MODEL_TYPE,
        "type": kind.type,
        "options": {name: value for name, value in kind.options.items() if name != "path" or not model.checkpoint},
        "is_critic": is_critic,
        "spaces": describe_spaces(spaces),
    }
    return LoadedPolicy(model, partial(_describe, about, model.checkpoint))


def model_for(config: ModelConfig, key: str, spaces: Spaces, *, is_critic: bool) -> BodyPolicy | BodyValue:
    """The model of `open_model` before the weights of its folder are loaded; errors as there."""
    return _new(config, key, spaces, is_critic=is_critic)[0]


def _new(
    config: ModelConfig, key: str, spaces: Spaces, *, is_critic: bool
) -> tuple[BodyPolicy | BodyValue, PolicyConfig, Mapping[str, Json]]:
    """A model as it is made, its kind, and what its folder says, if there is one."""
    saved: Mapping[str, Json] = _described(config.path, key) if config.path else {}
    was_critic = bool(saved.get("is_critic"))
    if was_critic and not is_critic:
        raise RecipeError.at(key, f"'{config.path}' is a critic, which does not act: give the folder of a policy")
    kind = config.body or _saved_kind(saved, Path(config.path), key, is_critic=is_critic)
    if saved and saved.get("spaces") != (mine := describe_spaces(spaces)):
        theirs = saved.get("spaces")
        differing = sorted(name for name in mine if not isinstance(theirs, Mapping) or theirs.get(name) != mine[name])
        name = differing[0]
        was = theirs.get(name) if isinstance(theirs, Mapping) else None
        raise RecipeError.at(
            key,
            f"'{config.path}' is for another body: its {name} is {was}, but that of the environment is {mine[name]}",
        )
    model = make_model(kind, key, spaces, is_critic=is_critic)
    if config.compute_dtype != "float32" and any(isinstance(one, StateNormalizer) for one in model.modules()):
        raise RecipeError.at(
            f"{key}.compute_dtype",
            f"is {config.compute_dtype}, in which the mean of a state has three digits; with normalize: true, set "
            "it to float32",
        )
    return model, kind, saved


def _kind_of(saved: Mapping[str, Json], folder: Path) -> PolicyConfig:
    """The kind of a saved model, which reads what it has kept of a checkpoint, if it began with one."""
    options = saved["options"]
    assert isinstance(options, dict)
    base = {"path": str(folder / BASE)} if (folder / BASE).is_dir() else {}
    return PolicyConfig(type=str(saved["type"]), options={**options, **base})


def _saved_kind(saved: Mapping[str, Json], folder: Path, key: str, *, is_critic: bool) -> PolicyConfig:
    """The kind of a model that begins with a folder. A critic leaves out options that only policies have."""
    kind = _kind_of(saved, folder)
    if not is_critic or saved.get("is_critic"):
        return kind
    known = inspect.signature(_class_of(kind, key, is_critic=True)).parameters
    return PolicyConfig(type=kind.type, options={name: value for name, value in kind.options.items() if name in known})


def empty_model(folder: Path) -> BodyPolicy | BodyValue:
    """The model that a folder describes, without its weights; a RecipeError says why it cannot be made."""
    about = _described(str(folder), "models")
    spaces = _read_spaces(cast("Mapping[str, Any]", about["spaces"]))
    return make_model(_kind_of(about, folder), "models", spaces, is_critic=bool(about["is_critic"]))


def _read_spaces(about: Mapping[str, Any]) -> Spaces:
    """The inverse of `describe_spaces`, without the length of episodes."""
    actions: Continuous | Discrete
    if "num_choices" in (taken := about["actions"]):
        actions = Discrete(int(taken["num_choices"]))
    else:
        actions = Continuous(tuple(map(float, taken["low"])), tuple(map(float, taken["high"])))
    images = {camera: (int(height), int(width)) for camera, (height, width) in about["images"].items()}
    return Spaces(images, int(about["state_size"]), actions, 1)


def make_model(kind: PolicyConfig, key: str, spaces: Spaces, *, is_critic: bool) -> BodyPolicy | BodyValue:
    """Make a model with random weights, which do not depend on what was drawn before.

    Raises:
        RecipeError: There is no such model, or it cannot be made for such a body.
    """
    found = _class_of(kind, key, is_critic=is_critic)
    try:
        inspect.signature(found).bind(spaces, **kind.options)
    except TypeError as error:
        raise RecipeError.at(
            f"{key}.body.options", f"{found.__name__}{inspect.signature(found)} does not take them: {error}"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return found(spaces, **kind.options)
        except (ValueError, ImportError) as error:
            raise RecipeError.at(f"{key}.body", f"'{kind.type}' cannot be made: {error}") from error


def _class_of(kind: PolicyConfig, key: str, *, is_critic: bool) -> type[BodyPolicy | BodyValue]:
    known = VALUES if is_critic else POLICIES
    name = known.get(kind.type, kind.type)
    if not is_function_name(name):
        raise RecipeError.at(
            f"{key}.body.type",
            f"unknown {'critic' if is_critic else 'policy'} '{name}'{nearest(name, known)}; a custom one is "
            "'package.module:Class'",
        )
    return load_class(name, f"{key}.body.type", BodyValue if is_critic else BodyPolicy)


def describe_spaces(spaces: Spaces) -> dict[str, Json]:
    """Body that a model was made for, as JSON."""
    actions = spaces.actions
    taken: Json = (
        {"low": list(actions.low), "high": list(actions.high)}
        if isinstance(actions, Continuous)
        else {"num_choices": actions.num_choices}
    )
    images: dict[str, Json] = {camera: list(size) for camera, size in spaces.images.items()}
    return {"images": images, "state_size": spaces.state_size, "actions": taken}


def _describe(about: Mapping[str, Json], checkpoint: Path | None, folder: Path) -> None:
    if checkpoint is not None:
        (folder / BASE).mkdir(exist_ok=True)
        for file in (one for pattern in KEPT for one in sorted(checkpoint.glob(pattern))):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folder / BASE)
    (folder / "config.json").write_text(json.dumps(about, indent=2), encoding="utf-8")


def _described(path: str, key: str) -> Mapping[str, Json]:
    file = Path(path) / "config.json"
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError.at(key, f"'{path}' cannot be read: {error}") from error
    if not isinstance(about, dict) or about.get("model_type") != MODEL_TYPE:
        raise RecipeError.at(key, f"'{path}' is no policy of a body: its config.json has another model_type")
    return about


def _load(model: BodyModel, folder: Path, key: str, names: Mapping[str, str], *, is_whole: bool) -> None:
    """Load the weights of a folder, all of them if it is of the whole model; `names` are theirs there, by their own."""
    wanted = {names[name]: one for name, one in model.named_parameters() if name in names}
    files = sorted(folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, parameter in wanted.items():
        if name not in found or found[name].shape != parameter.shape:
            what = "lacks" if name not in found else f"has {tuple(found[name].shape)} numbers of"
            raise RecipeError.at(key, f"'{folder}' {what} the weight '{name}' of shape {tuple(parameter.shape)}")
        parameter.data.copy_(found[name])
    if is_whole and (unknown := sorted(found.keys() - wanted.keys())):
        raise RecipeError.at(key, f"'{folder}' has weights that the model does not know, such as '{unknown[0]}'")


def write_model(source: Path, out: Path) -> None:
    """Write the model of a checkpoint's folder into another one, from which recipes can load it."""
    from leaderless.worker.checkpoint.shards import read_tensors

    weights = {name: one.detach().contiguous() for name, one in empty_model(source).named_parameters()}
    read_tensors(source, {f"weights.{name}": one for name, one in weights.items()})
    save_file(weights, out / "model.safetensors")
    shutil.copy(source / "config.json", out)
    if (source / BASE).is_dir():
        shutil.copytree(source / BASE, out / BASE)
