"""Adapters of low rank (LoRA, Hu et al., arXiv 2106.09685) on the linear layers of a decoder, and on experts.

A layer with weight W computes x W^T + scale * x A^T B^T. W is never changed, and may have 4 bits a number; A and B are
what is trained, saved and sent.
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
from transformers.modeling_layers import GradientCheckpointingLayer

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.distributed.weights.tensor_parallel import is_of_experts
from leaderless.models.attention.indexed import indexer_of
from leaderless.models.attention.recurrence import is_mixer
from leaderless.models.lora.dropout import CurrentPass, dropped_product, key_of, watch_passes
from leaderless.models.lora.expert_lora import ExpertAdapters, adapt_experts, adapted_experts, from_peft, to_peft
from leaderless.models.lora.nf4 import FrozenLinear, check_library
from leaderless.models.parallel.expert import expert_modules
from leaderless.planner.checks.capabilities import only_for_text, unpackable
from leaderless.planner.graph.adapters import (
    CONFIG_FILE,
    PREFIX,
    SUFFIX,
    WEIGHTS_FILE,
    A,
    B,
    describe,
    lora_of,
    name_in_peft,
)
from leaderless.planner.memory.layers import TEXT_PART, check_block, is_named, of_text, sees, with_adapters


class LoraLinear(FrozenLinear):
    """A linear layer with an adapter; the weight of the layer keeps its name.

    Attributes:
        lora_A: [rank, inputs].
        lora_B: [outputs, rank].
        scale: Factor of their product.
        is_on: Whether the adapter takes part.
        key: Key of the layer, for dropout.
        first_input: Place of this rank's inputs among all, where ranks divide them.
        current: The current pass, which may drop some of the adapter's inputs.
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, name: str) -> None:
        """Take over the weights of a layer with a name, and add nothing to what it computes: B is 0."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.block = base.block if isinstance(base, FrozenLinear) else 0
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.zeros(config.rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.rank, device=device))
        self.scale, self.is_on = config.scale, True
        self.key, self.first_input = key_of(name), 0
        self.current = CurrentPass()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - named so in the base class
        """Compute the layer."""
        return self.adapted(input, self.product(input, self.bias))

    def adapted(self, values: Tensor, outputs: Tensor) -> Tensor:
        """The outputs of the layer, from those that it has without the adapter."""
        if not self.is_on:
            return outputs
        if (dropout := self.current.dropout) is None:
            inner = linear(values, self.lora_A)
        else:
            inner = dropped_product(values, self.lora_A, dropout, self.key, self.first_input)
        return outputs + linear(inner, self.lora_B) * self.scale


def add_adapters(model: PreTrainedModel, settings: ModelConfig, key: str) -> None:
    """Put adapters on the linear layers of a model, and on its experts if they are to have some.

    A gets the distribution of `peft`, uniform between -1 / sqrt(inputs) and its opposite, from a seed that the name of
    the layer gives: the same on every rank.

    Args:
        model: Model whose layers are replaced.
        settings: Settings of the model; without adapters, nothing happens.
        key: Key of these settings, for errors.

    Raises:
        RecipeError: There is no linear layer, or none with the name of a target; experts cannot have adapters; weights
            cannot be packed; or a folder of adapters does not fit.
    """
    if (config := lora_of(settings, key)) is None:
        return
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    named = model.base_model.named_modules()
    untrained = {part for one in model.modules() if (indexer := indexer_of(one)) for part in indexer.modules()}
    layers = {f"{prefix}{name}": one for name, one in named if type(one) is nn.Linear and one not in untrained}
    if not layers:  # without any adapter, all weights would be trained
        raise RecipeError.at(
            f"{key}.lora",
            f"models of type {model.config.model_type} have no linear layers, which could have adapters: leave it out, "
            "to train all weights",
        )
    names = with_adapters(config, layers, freezes_vision=settings.freeze_vision)
    for target in () if config.targets == "all-linear" else config.targets:
        if not any(is_named(name, target) for name in names):
            reason = _why_not(target, layers, model)
            raise RecipeError.at(f"{key}.lora.targets", reason)
    recurrent = tuple(f"{name}." for name, module in model.named_modules() if is_mixer(module))
    if config.dropout and (inside := next((name for name in names if name.startswith(recurrent)), None)):
        raise RecipeError.at(
            f"{key}.lora.dropout",
            f"is {config.dropout}, but {inside} belongs to a layer that reads by recurrence, whose adapters have none: "
            "set it to 0, or name other layers in targets",
        )
    if config.packed_block:
        _check_packed(model, layers, config.packed_block, key)
        for name in of_text(layers):  # those without an adapter, too
            layers[name].__class__ = FrozenLinear
            layers[name].block = config.packed_block  # type: ignore[assignment]
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoraLinear(layers[name], config, name))
    adapt_experts(model, config, f"{key}.lora")
    _fill_all(model)
    if config.dropout:
        _prepare_dropout(model, key)
    if config.adapter is not None:
        _read(model, Path(config.adapter), f"{key}.lora.adapter")


def _check_packed(model: PreTrainedModel, layers: Mapping[str, nn.Linear], block: int, key: str) -> None:
    """Refuse to pack weights of a model with parts that are no linear layers, or use the weights of such layers."""
    has_others = any(is_mixer(one) or indexer_of(one) is not None for one in model.modules())
    if reason := unpackable(has_experts=bool(expert_modules(model)), has_others=has_others):
        raise RecipeError.at(
            f"{key}.lora.base_dtype", f"nf4 is not for models of type {model.config.model_type}{reason}"
        )
    check_library(key)
    for name in of_text(layers):
        check_block(key, name, layers[name].in_features, block)


def _why_not(target: str, layers: Iterable[str], model: PreTrainedModel) -> str:
    """Why a target names no linear layer of a model that gets an adapter."""
    if any(is_named(name, target) for name in layers):
        return f"'{target}' is a layer that freeze_vision leaves as it is: leave out one of the two"
    linear = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
    experts = (name for name, weight in model.named_parameters() if is_of_experts(name, weight.shape))
    if "experts" in target.split(".") or any(is_named(name, target) for name in experts):
        return f"'{target}' names experts: leave it out, and set expert_rank; linear layers are {linear}"
    return f"'{target}' is no linear layer of {model.config.model_type}: these are {linear}"


def _prepare_dropout(model: PreTrainedModel, key: str) -> None:
    """Give adapters the current pass of the decoder layer around them, for its dropout."""
    others = dict(adapted_layers(model))
    for name, layer in model.named_modules():
        if not isinstance(layer, GradientCheckpointingLayer) or sees(name):
            continue
        if inside := [*adapted_layers(layer)]:
            current = watch_passes(layer)
            for own, adapted in inside:
                adapted.current = current
                others.pop(f"{name}.{own}", None)
    if others:
        raise RecipeError.at(f"{key}.lora.dropout", only_for_text(next(iter(others))))


def give_adapters_values(model: PreTrainedModel, settings: ModelConfig, key: str) -> None:
    """Give the adapters of a model without weights the values with which they begin; see `add_adapters`."""
    for module in model.modules():
        for name, matrix in [one for one in module.named_parameters(recurse=False) if is_adapter(one[0])]:
            setattr(module, name, nn.Parameter(torch.zeros(matrix.shape)))
    _fill_all(model)
    lora = lora_of(settings, key)
    if lora is not None and lora.adapter is not None:
        _read(model, Path(lora.adapter), f"{key}.lora.adapter")


def share_weights(model: PreTrainedModel, donor: PreTrainedModel) -> None:
    """Let a model use the memory of another one's weights, all but the adapters'; neither may change them.

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
    for name, buffer in model.named_buffers():
        buffer.copy_(donor.get_buffer(name))


def _read(model: PreTrainedModel, folder: Path, key: str) -> None:
    """Give adapters the values of a folder."""
    matrices = {name: one for name, one in model.named_parameters() if is_adapter(name)}
    try:
        saved = load_file(folder / WEIGHTS_FILE)
    except Exception as error:
        raise RecipeError.at(key, f"{folder / WEIGHTS_FILE} cannot be read: {error}") from error
    names = {f"{PREFIX}{name_in_peft(name)}{SUFFIX}": name for name in matrices}
    found = {names.get(name, name.removeprefix(PREFIX).removesuffix(SUFFIX)): value for name, value in saved.items()}
    for name in sorted(matrices.keys() ^ found.keys()):
        has, lacks = ("the model", folder) if name in matrices else (folder, "the model")
        raise RecipeError.at(key, f"{has} has {name}, which {lacks} lacks: the adapters are those of another model")
    for name, matrix in matrices.items():
        value, wanted = found[name], to_peft(name, matrix)
        if wanted.shape != value.shape:
            sizes = f"{tuple(value.shape)} in {folder}, but {tuple(wanted.shape)} in the model"
            raise RecipeError.at(key, f"{name} is {sizes}: the adapters are those of another model")
        if not matrix.is_meta:
            matrix.data.copy_(value if matrix.ndim == value.ndim else from_peft(name, value, len(matrix)))


def write_adapters(folder: Path, weights: Mapping[str, Tensor], settings: ModelConfig) -> None:
    """Write a folder that `peft` reads.

    Args:
        folder: Folder, which exists.
        weights: Matrices of the adapters by name.
        settings: Settings of the model and of its adapters.
    """
    saved = {f"{PREFIX}{name_in_peft(name)}{SUFFIX}": to_peft(name, one).contiguous() for name, one in weights.items()}
    save_file(saved, folder / WEIGHTS_FILE, {"format": "pt"})
    describe_adapters(folder, {name: one.shape for name, one in weights.items()}, settings)


def describe_adapters(folder: Path, shapes: Mapping[str, torch.Size], settings: ModelConfig) -> None:
    """Write what `peft` has to know of adapters whose matrices have some names and shapes."""
    lora = settings.lora
    assert lora is not None, "only adapters are described"
    ranks = {shape[1] for name, shape in shapes.items() if is_of_experts(name, shape) and name.endswith(A)}
    layers = {name.rpartition(".")[0] for name, shape in shapes.items() if is_adapter(name) and len(shape) < 3}
    if any(name.startswith(TEXT_PART) for name in layers):
        targets = sorted(layers)  # what sees may have layers with the same last names
    elif lora.targets == "all-linear":
        targets = sorted({name.rpartition(".")[2] for name in layers})
    else:
        targets = [*lora.targets]  # which may be some of the layers with a name
    text = json.dumps(describe(settings, targets, next(iter(ranks), None)), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _fill_all(model: nn.Module) -> None:
    """Draw every A. On the device `meta`, there is nothing to draw."""
    for name, matrix in model.named_parameters():
        if name.endswith(A) and not matrix.is_meta:
            layer = name[: -len(A) - 1]  # a layer, or the weight of experts
            seed = int.from_bytes(hashlib.blake2b(layer.encode(), digest_size=8).digest(), "big")
            bound = 1 / math.sqrt(matrix.shape[-1])
            with torch.no_grad():
                matrix.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed >> 1))


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The layers with adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a weight is a matrix of an adapter, by its name."""
    return name.endswith((A, B))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as if it had no adapters."""
    adapters: list[LoraLinear | ExpertAdapters] = [layer for _, layer in adapted_layers(model)]
    adapters += [experts.adapters for _, experts in adapted_experts(model)]
    for one in adapters:
        one.is_on = False
    try:
        yield
    finally:
        for one in adapters:
            one.is_on = True


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
    for _, experts in list(adapted_experts(model)):
        experts.merge()


def trained_weights(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that training changes: adapters and a scalar head, or all if there are no adapters."""
    weights = list(model.named_parameters())
    if not any(is_adapter(name) for name, _ in weights):
        yield from weights
        return
    heads = {id(one) for one in cast("nn.Module", getattr(model, "score", nn.Module())).parameters()}
    yield from ((name, weight) for name, weight in weights if is_adapter(name) or id(weight) in heads)
