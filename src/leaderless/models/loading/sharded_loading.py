"""Models of which each rank reads its own part, so that no rank ever has more of the weights.

A model is made without values, divided like one that has them, and then completed: each rank reads from the files the
blocks that it holds. What is wrong with the files is found from their headers, by all ranks alike, before they divide
anything.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.sources.hub import explained, unreachable_hub
from leaderless.distributed.weights.blocks import LocalWeight, whole_block
from leaderless.models.causal_lm import CausalLM, language_model, load_causal_lm
from leaderless.models.decoder import (
    SCALAR_HEAD,
    Decoder,
    class_for,
    empty_decoder,
    load_model_config,
    quiet_loading,
)
from leaderless.models.loading.family_trial import trial_model
from leaderless.models.loading.support import NotFiniteError, check_settings, check_supported
from leaderless.models.loading.weight_sources import (
    UnknownFormError,
    WeightFiles,
    WeightSource,
    WrongSizeError,
    find_sources,
)
from leaderless.models.lora.linear import is_adapter
from leaderless.models.lora.nf4 import FrozenLinear, as_numbers, divided_like, packed
from leaderless.models.value_model import load_value_model, value_model
from leaderless.planner.checks.model_files import quantization_of


class _OnlyWholeError(Exception):
    """A model can only be read whole."""


@dataclass(frozen=True)
class ShardedModelFiles:
    """A model that is to be divided, and then completed.

    Attributes:
        decoder: The model, without values until it is completed; or with them, if it could only be read whole.
        trial: A small model of the same family with values, to try how it can be divided; or the model itself. None if
            another one like it has been divided so.
        files: Its files; None if it was read whole.
    """

    decoder: Decoder
    trial: PreTrainedModel | None
    files: WeightFiles | None


def open_model(config: ModelConfig, role: str, *, is_critic: bool = False, num_ranks: int = 1) -> ShardedModelFiles:
    """Open a language model, or a value model, whose weights are read once ranks have divided them.

    Args:
        config: Settings of the model.
        role: Its role, for errors.
        is_critic: Whether it is a value model, with a scalar head.
        num_ranks: Ranks that divide it: several are warned if each has to read the whole.

    Raises:
        RecipeError: As of `load_decoder`; all ranks raise the same.
    """
    try:
        return _open(config, role, is_critic=is_critic)
    except _OnlyWholeError as reason:
        if num_ranks > 1:
            warnings.warn(
                f"models.{role}: each rank reads all of '{config.path}' at the start, and needs memory for that, since "
                f"{reason}",
                stacklevel=2,
            )
        decoder: Decoder = (load_value_model if is_critic else load_causal_lm)(config, role)
        return ShardedModelFiles(decoder, decoder.model, None)


def _open(config: ModelConfig, role: str, *, is_critic: bool) -> ShardedModelFiles:
    key, unreachable = f"models.{role}", unreachable_hub(config.path)
    auto_class: type[AutoModel] = AutoModelForTokenClassification if is_critic else AutoModelForCausalLM
    with quiet_loading():
        described = load_model_config(config, role)
        check_settings(described, key)
        kind = class_for(described, auto_class, key)
        if reason := quantization_of(vars(described)):
            raise RecipeError.at(key, f"'{config.path}' {reason}")
        if getattr(described, "transformers_weights", None) is not None:
            raise _OnlyWholeError("its config.json names a file of weights")
        try:
            files = WeightFiles.find(config)
        except (OSError, SafetensorError, ValueError) as error:
            raise RecipeError.at(key, f"'{config.path}' cannot be loaded: {explained(error, unreachable)}") from error
        if files is None:
            raise _OnlyWholeError("it has no safetensors: save it with save_pretrained of transformers")
        if is_critic:
            described.num_labels = 1
        try:
            trial = trial_model(described, kind, trust_remote_code=config.trust_remote_code)
        except Exception as error:
            # `transformers` raises errors of every kind for settings that do not go together.
            raise _OnlyWholeError(f"no small model of its family can be made: {error}") from error
        check_supported(trial, key)
        model = empty_decoder(auto_class, config, role, has_adapters=True, has_scalar_head=is_critic)
        sources = _sources(model, files, config, key, has_scalar_head=is_critic)
    decoder: Decoder = value_model(model, config, role) if is_critic else language_model(model, config, role)
    decoder.complete = _Reader(model, files, sources, decoder.saved_buffers, key).complete
    return ShardedModelFiles(decoder, trial, files)


def fill_buffers(model: CausalLM, config: ModelConfig, role: str) -> None:
    """Give the buffers of a model the values in its files; its weights come from elsewhere.

    Raises:
        RecipeError: The files cannot be read, or have buffers of other sizes.
    """
    if not model.saved_buffers:
        return
    try:
        with quiet_loading():
            files = WeightFiles.find(config)
            if files is not None:
                sources = find_sources(model.model, files)
                for name, buffer in model.saved_buffers.items():
                    _fill(buffer, name, sources, files)
                return
    except (OSError, SafetensorError, ValueError, WrongSizeError) as error:
        raise RecipeError.at(f"models.{role}", f"'{config.path}' cannot be loaded: {error}") from error
    except UnknownFormError:
        pass
    whole = load_causal_lm(config, role)
    for name, buffer in model.saved_buffers.items():
        buffer.copy_(whole.saved_buffers[name])


def _fill(buffer: Tensor, name: str, sources: Mapping[str, Sequence[WeightSource]], files: WeightFiles) -> None:
    """Read a buffer that is in the files."""
    for source in sources.get(name, ()):
        source.read(files, whole_block(tuple(buffer.shape)), buffer)


def _sources(
    model: PreTrainedModel, files: WeightFiles, config: ModelConfig, key: str, *, has_scalar_head: bool
) -> Mapping[str, Sequence[WeightSource]]:
    """Where all weights are; refuses files that lack some, or have other sizes."""
    try:
        sources = dict(find_sources(model, files))
    except UnknownFormError as error:
        raise _OnlyWholeError(str(error)) from error
    except WrongSizeError as error:
        reason = f"'{config.path}' has weights of another size than it says: {error}"
        raise RecipeError.at(key, reason) from error
    _tie(model, files, sources)
    tied = {*model.all_tied_weights_keys} - sources.keys()
    ignored = model._keys_to_ignore_on_load_missing or ()  # noqa: SLF001 - a setting of every family
    lacking = sorted(
        name
        for name in model.state_dict().keys() - sources.keys() - tied
        if not (is_adapter(name) or (has_scalar_head and name in SCALAR_HEAD))
        and not any(re.search(pattern, name) for pattern in ignored)
    )
    num_layers = model.config.get_text_config().num_hidden_layers
    said = f"its config.json says num_hidden_layers={num_layers}"
    if lacking:
        raise RecipeError.at(key, f"'{config.path}' lacks {len(lacking)} of its weights, as {lacking[0]} ({said})")
    used = {source.name for parts in sources.values() for source in parts}
    unneeded = "|".join(model._keys_to_ignore_on_load_unexpected or ("^$",))  # noqa: SLF001 - as layers for drafts
    for name in sorted(files.tensors.keys() - used):
        layer = re.search(r"(?<!mtp)\.layers\.(\d+)\.", f".{name}")
        if layer and int(layer[1]) >= num_layers and not re.search(unneeded, name):
            raise RecipeError.at(key, f"'{config.path}' has {name}, but {said}: correct it")
    return sources


def _tie(model: PreTrainedModel, files: WeightFiles, sources: dict[str, Sequence[WeightSource]]) -> None:
    """Find the one source of weights that are the same, as words often are; those that differ in the files are two."""
    for name, same in [*model.all_tied_weights_keys.items()]:
        if name in sources and same not in sources:
            sources[same] = sources.pop(name)
        elif name in sources:
            pairs = [*zip(sources[name], sources[same], strict=False)]
            if all(files.are_equal(one.name, other.name) for one, other in pairs):
                del sources[name]
                continue
            path, _, own = name.rpartition(".")
            weight = model.get_parameter(name)
            setattr(model.get_submodule(path), own, nn.Parameter(torch.empty_like(weight), requires_grad=False))
            del model.all_tied_weights_keys[name]


@dataclass(frozen=True)
class _Reader:
    """Reads what a rank holds of a model."""

    model: PreTrainedModel
    files: WeightFiles
    sources: Mapping[str, Sequence[WeightSource]]
    buffers: Mapping[str, Tensor]
    key: str

    def complete(self, whole: Callable[[str, Tensor], Tensor], device: torch.device) -> None:
        """Read the values of all weights that have none, for a divided weight only this rank's part.

        Raises:
            RecipeError: A value is not finite.
        """
        try:
            self._complete(whole, device)
        except NotFiniteError as error:
            raise RecipeError.at(self.key, str(error)) from error

    def _complete(self, whole: Callable[[str, Tensor], Tensor], device: torch.device) -> None:
        done: dict[nn.Parameter, nn.Parameter] = {}  # those that modules share stay shared
        for path, module in [*self.model.named_modules()]:
            for name, weight in [*module.named_parameters(recurse=False)]:
                if not weight.is_meta:
                    continue
                if weight not in done:
                    full = f"{path}.{name}" if path else name
                    block = module.block if isinstance(module, FrozenLinear) and weight.dtype is torch.uint8 else 0
                    done[weight] = (
                        self._read_packed(full, weight, block, whole, device)
                        if block
                        else self._read(full, weight, whole(full, weight), device)
                    )
                setattr(module, name, done[weight])
        # Those of all layers, and those of this rank's, which may have been moved to its device.
        for name, buffer in (*self.buffers.items(), *self.model.named_buffers()):
            _fill(buffer, name, self.sources, self.files)

    def _read_packed(
        self, name: str, weight: nn.Parameter, block: int, whole: Callable[[str, Tensor], Tensor], device: torch.device
    ) -> nn.Parameter:
        """A packed weight, whose numbers are in memory until they are packed."""
        numbers = nn.Parameter(as_numbers(weight, block, has_values=False), requires_grad=False)
        read = self._read(name, numbers, whole(name, numbers), device).detach()
        if isinstance(read, DTensor):
            return nn.Parameter(divided_like(read, packed(read.to_local(), block)), requires_grad=False)
        return nn.Parameter(packed(read, block), requires_grad=False)

    def _read(self, name: str, weight: nn.Parameter, shown: Tensor, device: torch.device) -> nn.Parameter:
        """A weight with values, as it is divided."""
        block = LocalWeight.of(name, shown).block
        # What no file has is the scalar head of a model that had none.
        sources = self.sources.get(name) or self.sources.get(self.model.all_tied_weights_keys.get(name, name), ())
        make = torch.empty if sources else torch.zeros
        local = make(block.sizes, dtype=weight.dtype, device=device)
        for source in sources:
            source.read(self.files, block, local)
        value: Tensor = local
        if isinstance(weight, DTensor):
            value = DTensor.from_local(
                local,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            )
        return nn.Parameter(value, requires_grad=weight.requires_grad)
