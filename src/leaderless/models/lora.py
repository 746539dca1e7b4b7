"""Adapters of low rank (LoRA, Hu et al., arXiv 2106.09685) on the linear layers of a decoder.

A layer with weight W computes x W^T + scale * x A^T B^T. W is never changed; A and B are what is trained, saved and
sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.planner.adapters import CONFIG_FILE, PREFIX, SUFFIX, WEIGHTS_FILE, describe, lora_of
from leaderless.planner.linear_layers import TEXT_PART, is_named, with_adapters

A, B = "lora_A", "lora_B"
"""Names of the two matrices, as `peft` calls them."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; the weight of the layer keeps its name.

    Attributes:
        lora_A: [rank, inputs].
        lora_B: [outputs, rank].
        scale: Factor of their product.
        is_on: Whether the adapter takes part.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        """Take over the weights of a layer, and add nothing to what it computes: B is 0."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.zeros(config.rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.rank, device=device))
        self.scale, self.is_on = config.scale, True

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - named so in the base class
        """Compute the layer."""
        return self.adapted(input, linear(input, self.weight, self.bias))

    def adapted(self, values: Tensor, outputs: Tensor) -> Tensor:
        """The outputs of the layer, from those that it has without the adapter."""
        if not self.is_on:
            return outputs
        return outputs + linear(linear(values, self.lora_A), self.lora_B) * self.scale


def add_adapters(model: PreTrainedModel, settings: ModelConfig, key: str) -> None:
    """Put adapters on the linear layers of a model.

    A gets the distribution of `peft`, uniform between -1 / sqrt(inputs) and its opposite, from a seed that the name of
    the layer gives: the same on every rank.

    Args:
        model: Model whose layers are replaced.
        settings: Settings of the model; without adapters, nothing happens.
        key: Key of these settings, for errors.

    Raises:
        RecipeError: There is no linear layer, or none with the name of a target; or a folder of adapters does not fit.
    """
    if (config := lora_of(settings, key)) is None:
        return
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    named = model.base_model.named_modules()
    layers = {f"{prefix}{name}": one for name, one in named if type(one) is nn.Linear}
    if not layers:  # without any adapter, all weights would be trained
        raise RecipeError.at(
            f"{key}.lora",
            f"models of type {model.config.model_type} have no linear layers, which could have adapters: leave it out, "
            "to train all weights",
        )
    names = with_adapters(config, layers, freezes_vision=settings.freeze_vision)
    for target in () if config.targets == "all-linear" else config.targets:
        if not any(is_named(name, target) for name in names):
            reason = f"'{target}' is no linear layer of {model.config.model_type}: these are "
            reason += ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            if any(is_named(name, target) for name in layers):
                reason = f"'{target}' is a layer that freeze_vision leaves as it is: leave out one of the two"
            raise RecipeError.at(f"{key}.lora.targets", reason)
    for name in names:
        parent, _, own = name.rpartition(".")
        adapted = LoraLinear(layers[name], config)
        _fill(adapted.lora_A, name)
        setattr(model.get_submodule(parent), own, adapted)
    if config.adapter is not None:
        _read(model, Path(config.adapter), f"{key}.lora.adapter")


def give_adapters_values(model: PreTrainedModel, settings: ModelConfig, key: str) -> None:
    """Give the adapters of a model without weights the values with which they begin; see `add_adapters`."""
    for name, layer in adapted_layers(model):
        layer.lora_A, layer.lora_B = (nn.Parameter(torch.zeros(one.shape)) for one in (layer.lora_A, layer.lora_B))
        _fill(layer.lora_A, name)
    lora = lora_of(settings, key)
    if lora is not None and lora.adapter is not None:
        _read(model, Path(lora.adapter), f"{key}.lora.adapter")


def share_weights(model: PreTrainedModel, donor: PreTrainedModel) -> None:
    """Let a model use the memory of another one's weights, all but those of adapters; neither may change them.

    Later, weights whose rows ranks cannot divide evenly are copied, since their parts are filled up.

    Args:
        model: Model whose weights have no values.
        donor: Model with the same weights, divided over ranks in the same way.
    """
    own: dict[nn.Parameter, nn.Parameter] = {}  # those that modules share stay shared
    for path, module in model.named_modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            if weight.is_meta:
                given = donor.get_parameter(f"{path}.{name}" if path else name)
                setattr(module, name, own.setdefault(given, nn.Parameter(given.detach(), requires_grad=False)))


def _read(model: PreTrainedModel, folder: Path, key: str) -> None:
    """Give adapters the values of a folder."""
    matrices = {name: one for name, one in model.named_parameters() if is_adapter(name)}
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except Exception as error:
        raise RecipeError.at(key, f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    found = {name.removeprefix(PREFIX).removesuffix(SUFFIX): value for name, value in saved.items()}
    for name in sorted(matrices.keys() ^ found.keys()):
        has, lacks = ("the model", folder) if name in matrices else (folder, "the model")
        raise RecipeError.at(key, f"{has} has {name}, which {lacks} lacks: the adapters are those of another model")
    for name, matrix in matrices.items():
        if matrix.shape != found[name].shape:
            sizes = f"{tuple(found[name].shape)} in {folder}, but {tuple(matrix.shape)} in the model"
            raise RecipeError.at(key, f"{name} is {sizes}: the adapters are those of another model")
        if not matrix.is_meta:
            matrix.data.copy_(found[name])


def write_adapters(folder: Path, weights: Mapping[str, Tensor], settings: ModelConfig) -> None:
    """Write a folder that `peft` reads.

    Args:
        folder: Folder, which exists.
        weights: Matrices of the adapters by name.
        settings: Settings of the model and of its adapters.
    """
    saved = {f"{PREFIX}{name}{SUFFIX}": value.contiguous() for name, value in weights.items()}
    save_file(saved, folder / WEIGHTS_FILE, {"format": "pt"})
    describe_adapters(folder, weights, settings)


def describe_adapters(folder: Path, names: Iterable[str], settings: ModelConfig) -> None:
    """Write what `peft` has to know of adapters whose matrices have some names."""
    lora = settings.lora
    assert lora is not None, "only adapters are described"
    layers = {name.rpartition(".")[0] for name in names if is_adapter(name)}
    if any(name.startswith(TEXT_PART) for name in layers):
        targets = sorted(layers)  # what sees may have layers with the same last names
    elif lora.targets == "all-linear":
        targets = sorted({name.rpartition(".")[2] for name in layers})
    else:
        targets = [*lora.targets]  # which may be some of the layers with a name
    text = json.dumps(describe(settings, targets), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _fill(matrix: nn.Parameter, name: str) -> None:
    """Draw A. On the device `meta`, there is nothing to draw."""
    if not matrix.is_meta:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
        bound = 1 / math.sqrt(matrix.shape[1])
        with torch.no_grad():
            matrix.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed >> 1))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers with adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a weight is a matrix of an adapter, by its name."""
    return name.rpartition(".")[2] in {A, B}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as if it had no adapters."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def merged(layer: LoraLinear, weight: Tensor, matrix_a: Tensor, matrix_b: Tensor) -> Tensor:
    """The weight that computes what a layer with an adapter does, or some rows of it.

    Args:
        layer: The layer.
        weight: [n, inputs], rows of its weight.
        matrix_a: [rank, inputs], all of A.
        matrix_b: [n, rank], the same rows of B.
    """
    return torch.addmm(weight, matrix_b, matrix_a, alpha=layer.scale)


def merge_adapters(model: PreTrainedModel) -> None:
    """Change a model, whole on this rank, into a plain one that computes the same."""
    for name, layer in list(adapted_layers(model)):
        parent, _, own = name.rpartition(".")
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        rows = merged(layer, layer.weight.detach(), layer.lora_A.detach(), layer.lora_B.detach())
        plain.weight, plain.bias = nn.Parameter(rows), layer.bias
        setattr(model.get_submodule(parent), own, plain)


def trained_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that training changes: those of adapters and of a scalar head, or all if there are no adapters."""
    weights = list(model.named_parameters())
    if not any(is_adapter(name) for name, _ in weights):
        yield from weights
        return
    heads = {id(one) for one in cast("nn.Module", getattr(model, "score", nn.Module())).parameters()}
    yield from ((name, weight) for name, weight in weights if is_adapter(name) or id(weight) in heads)
