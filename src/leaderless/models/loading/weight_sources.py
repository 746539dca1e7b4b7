"""Where each weight of a model comes from: which tensors of its files, and which part of the weight each of them is.

`transformers` joins what files have apart, as the experts of a layer, and divides what they have joined. It describes
this for whole tensors; here the same descriptions are read as places, so that a block of a weight can be read alone.

    weight [experts, 2 * inner, hidden]        expert 0: gate_proj, up_proj
                                               expert 1: gate_proj, up_proj

Other software wants weights apart again, in the form in which they are saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from leaderless.config.models import ModelConfig
from leaderless.distributed.weights.blocks import Shape, WeightBlock
from leaderless.distributed.weights.files import StoredTensor, read_block, read_header
from leaderless.models.loading.support import check_finite
from leaderless.models.parallel.expert import num_experts


@dataclass
class WeightFiles:
    """The tensors of a model's files, none of which has been read yet.

    Attributes:
        tensors: The tensors by their names in the files.
        num_bytes: Bytes of tensors that have been read.
    """

    tensors: Mapping[str, StoredTensor]
    num_bytes: int = field(default=0, compare=False)

    @classmethod
    def find(cls, config: ModelConfig) -> WeightFiles | None:
        """Find a model's files, download them if need be, and read their headers; None if they are no safetensors.

        Raises:
            OSError: A file cannot be read, or is not there.
            SafetensorError: A file is damaged.
            ValueError: An index does not fit its files.
        """
        if (single := _file(config, SAFE_WEIGHTS_NAME)) is not None:
            return cls(_read(single))
        index = _file(config, SAFE_WEIGHTS_INDEX_NAME)
        return None if index is None else cls(_indexed(config, index))

    def read(self, name: str, offsets: tuple[int, ...], target: Tensor) -> None:
        """Read a block of a tensor in place, of which `offsets` is the first element."""
        self.num_bytes += read_block(self.tensors[name], offsets, target)

    def are_equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same values; a few rows are in memory at a time."""
        one, two = self.tensors[name], self.tensors[other]
        if one.shape != two.shape or one.dtype != two.dtype:
            return False
        num_rows = max(1, (1 << 22) // max(1, one.shape[-1]))
        for first in range(0, one.shape[0], num_rows):
            blocks = [torch.empty(min(num_rows, one.shape[0] - first), *one.shape[1:], dtype=one.dtype) for _ in "12"]
            for block, own in zip(blocks, (name, other), strict=True):
                self.read(own, (first,) + (0,) * (len(one.shape) - 1), block)
            if not torch.equal(*blocks):
                return False
        return True


def _file(config: ModelConfig, name: str) -> Path | None:
    """A file of a model's folder, on this machine or on the hub."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": False}
    found = cached_file(config.path, name, revision=config.revision, **options)
    return None if found is None else Path(found)


def _read(file: Path) -> Mapping[str, StoredTensor]:
    try:
        return read_header(file).tensors
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        raise OSError(f"{file.name} is damaged, or not there: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _indexed(config: ModelConfig, index: Path) -> Mapping[str, StoredTensor]:
    """The tensors of all files that an index names."""
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index.name} is no index of files: {type(error).__name__}: {error}") from error
    tensors: dict[str, StoredTensor] = {}
    for name in names:
        if (file := _file(config, name)) is None:
            raise OSError(f"{index.name} names {name}, which is not there")
        tensors |= _read(file)
    for name, place in places.items():
        if name not in tensors or tensors[name].file.name != place:
            raise ValueError(f"{index.name} says that {name} is in {place}, which lacks it")
    return tensors


class UnknownFormError(Exception):
    """Files have weights in a form that can only be read whole."""


class WrongSizeError(Exception):
    """A weight has another size in the files than the model asks for."""


@dataclass(frozen=True)
class WeightSource:
    """A tensor of a file as a part of a weight.

    Attributes:
        name: Name of the tensor.
        block: Its place in the weight; it may reach beyond it, of which it then has a part.
        is_slice: Whether it lacks the first dimension of the weight, in which it has one place.
        is_turned: Whether its last two dimensions are swapped.
    """

    name: str
    block: WeightBlock
    is_slice: bool = False
    is_turned: bool = False

    def read(self, files: WeightFiles, wanted: WeightBlock, target: Tensor) -> None:
        """Read into a tensor with a block of the weight what this one has of it.

        Raises:
            NotFiniteError: It has values there that are not finite.
        """
        common = self.block.common(wanted)
        if not common.numel:
            return
        view = common.view(target, wanted)
        offsets = [first - begin for first, begin in zip(common.offsets, self.block.offsets, strict=True)]
        if self.is_slice:
            view, offsets = view[0], offsets[1:]
        if self.is_turned:
            view, offsets = view.transpose(-1, -2), [*offsets[:-2], offsets[-1], offsets[-2]]
        files.read(self.name, tuple(offsets), view)
        check_finite(view, self.name, files.tensors[self.name].file)


Sources = Mapping[str, Sequence[WeightSource]]
"""Tensors that make up each weight of a model, by the name of the weight; weights without any are not in the files."""


def find_sources(model: PreTrainedModel, files: WeightFiles) -> Sources:
    """Find out where the weights of a model, which may be without values, are in its files.

    Raises:
        UnknownFormError: They can only be read whole.
        WrongSizeError: They have other sizes.
    """
    renamings, converters, by_pattern = _conversions(model, has_legacy=True)
    wanted: dict[str, Tensor] = model.state_dict()
    found: dict[str, Sequence[WeightSource]] = {}
    parts: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    # The base model's name is added to names without it, or taken from those that have it for nothing.
    names = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": wanted}
    for name in sorted(files.tensors, key=dot_natural_key):
        own, pattern = rename_source_key(name, renamings, converters, **names)
        if own not in wanted and name in wanted:
            own, pattern = rename_source_key(name, [], [], **names)
        if own not in wanted:
            continue
        if pattern is None:
            found[own] = [_whole(own, name, wanted[own], files)]
        else:
            parts.setdefault(own, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(name)
    for first, (converter, by_source) in parts.items():
        targets = [first.replace(converter.target_patterns[0], one) for one in converter.target_patterns]
        tensors = [by_source.get(pattern, []) for pattern in converter.source_patterns]
        found |= _converted(converter.operations, targets, tensors, wanted, files)
    return found


def _conversions(
    model: PreTrainedModel, *, has_legacy: bool
) -> tuple[list[WeightRenaming], list[WeightConverter], dict[str, WeightConverter]]:
    """How `transformers` renames and converts what files have: the latter also by the pattern of a name."""
    mapping = get_model_conversion_mapping(model, add_legacy=has_legacy)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    return renamings, converters, {pattern: one for one in converters for pattern in one.source_patterns}


def _whole(weight: str, name: str, wanted: Tensor, files: WeightFiles) -> WeightSource:
    """A tensor that is a weight as it is."""
    shape = files.tensors[name].shape
    _check_size(weight, shape, tuple(wanted.shape))
    return WeightSource(name, WeightBlock((0,) * len(shape), shape))


def _converted(
    operations: Sequence[ConversionOps],
    targets: Sequence[str],
    tensors: Sequence[Sequence[str]],
    wanted: Mapping[str, Tensor],
    files: WeightFiles,
) -> dict[str, Sequence[WeightSource]]:
    """Where weights are that are made of tensors, given by pattern, or into which one tensor is divided."""
    kinds = [type(one) for one in operations]
    unknown = [name for name in targets if name not in wanted]
    if unknown:
        raise UnknownFormError(f"its files have a form of {unknown[0]}, which the model lacks")
    shape = tuple(wanted[targets[0]].shape)
    if kinds[:1] == [MergeModulelist] and getattr(operations[0], "dim", None) == 0 and len(targets) == 1:
        if kinds[1:] == [] and len(tensors) == 1:
            return {targets[0]: [*_stacked(targets[0], shape, tensors, files)]}
        if kinds[1:] == [Concatenate] and _dim(operations[1]) == 1:
            return {targets[0]: [*_stacked(targets[0], shape, tensors, files)]}
    (*others, names) = tensors
    if kinds == [Concatenate] and len(targets) == 1 and _dim(operations[0]) is not None:
        return {targets[0]: [*_joined(targets[0], shape, _dim(operations[0]) or 0, tensors, files)]}
    if kinds == [Chunk] and not others and len(names) == 1 and _dim(operations[0]) == 0:
        return _divided(targets, names[0], wanted, files)
    if kinds == [Transpose] and not others and len(names) == len(targets) == 1:
        return {targets[0]: [_turned(operations[0], targets[0], names[0], shape, files)]}
    raise UnknownFormError(f"{targets[0]} is made by {', '.join(kind.__name__ for kind in kinds)}")


def _dim(operation: ConversionOps) -> int | None:
    """The dimension of an operation that joins or divides; None if their number is a setting of the model."""
    is_plain = getattr(operation, "num_shards_attribute", None) is None
    dim = getattr(operation, "dim", None)
    return dim if is_plain and isinstance(dim, int) and dim >= 0 else None


def _stacked(weight: str, shape: Shape, tensors: Sequence[Sequence[str]], files: WeightFiles) -> Iterator[WeightSource]:
    """Tensors of experts: each one's, under every pattern, one after the other in the second dimension."""
    for names in tensors:
        if len(names) != shape[0]:
            lacking = _first_gap(names, shape[0])
            raise WrongSizeError(f"its {weight} is made of {len(names)} tensors, not of {shape[0]}{lacking}")
    begin = 0
    for names in tensors:
        rows = files.tensors[names[0]].shape[0]
        for place, name in enumerate(names):
            own = files.tensors[name].shape
            if own != (rows, *shape[2:]):
                raise WrongSizeError(f"its {name} is {own}, but its config.json asks for {(rows, *shape[2:])}")
            yield WeightSource(name, WeightBlock((place, begin, *(0,) * (len(shape) - 2)), (1, *own)), is_slice=True)
        begin += rows
    _check_size(weight, (shape[0], begin, *shape[2:]), shape)


def _first_gap(names: Sequence[str], count: int) -> str:
    """Which of some numbered tensors is not there."""
    if len(names) < 2:
        return ""
    first, second = (re.split(r"(\d+)", name) for name in names[:2])
    place = next(place for place, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
    missing = ("".join([*first[:place], str(number), *first[place + 1 :]]) for number in range(count))
    return next((f": {name} is not there" for name in missing if name not in names), "")


def _joined(
    weight: str, shape: Shape, dim: int, tensors: Iterable[Sequence[str]], files: WeightFiles
) -> Iterator[WeightSource]:
    """Tensors one after the other in a dimension."""
    begin = 0
    for name in (name for names in tensors for name in names):
        own = files.tensors[name].shape
        _check_size(name, own, (*shape[:dim], own[dim] if dim < len(own) else 0, *shape[dim + 1 :]))
        yield WeightSource(name, WeightBlock((*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)), own))
        begin += own[dim]
    _check_size(weight, (*shape[:dim], begin, *shape[dim + 1 :]), shape)


def _divided(
    targets: Sequence[str], name: str, wanted: Mapping[str, Tensor], files: WeightFiles
) -> dict[str, Sequence[WeightSource]]:
    """A tensor of the rows of several weights, the same number for each."""
    own, found, begin = files.tensors[name].shape, dict[str, Sequence[WeightSource]](), 0
    rows = -(-own[0] // len(targets))
    for weight in targets:
        shape = tuple(wanted[weight].shape)
        _check_size(weight, (min(rows, own[0] - begin), *own[1:]), shape)
        found[weight] = [WeightSource(name, WeightBlock((-begin, *(0,) * (len(own) - 1)), own))]
        begin += rows
    return found


def _turned(operation: ConversionOps, weight: str, name: str, shape: Shape, files: WeightFiles) -> WeightSource:
    """A tensor with two dimensions swapped, if need be."""
    own, dims = files.tensors[name].shape, {getattr(operation, one) % len(shape) for one in ("dim0", "dim1")}
    if getattr(operation, "check_dims", False) and own == shape:
        return WeightSource(name, WeightBlock((0,) * len(shape), shape))
    if dims != {len(shape) - 2, len(shape) - 1}:
        raise UnknownFormError(f"{weight} is made of a tensor whose dimensions {sorted(dims)} are swapped")
    _check_size(weight, (*own[:-2], own[-1], own[-2]), shape)
    return WeightSource(name, WeightBlock((0,) * len(shape), shape), is_turned=True)


def _check_size(weight: str, own: Shape, wanted: Shape) -> None:
    if own != wanted:
        raise WrongSizeError(f"its {weight} is {own}, but its config.json asks for {wanted}")


SavedForm = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""From the name of a weight and the weight to the weights of which it is made in a folder."""


def unchanged(name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
    """A weight as it is."""
    return [(name, weight)]


def form_of(model: PreTrainedModel) -> SavedForm:
    """How weights of a model are saved, one by one; the model itself may be without values.

    A model without experts keeps them as they are.
    """
    if not num_experts(model):
        return unchanged
    known = model.state_dict().keys()

    def convert(name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
        return revert_weight_conversion(model, {name: weight}).items() if name in known else unchanged(name, weight)

    return convert


def joined(weights: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Weights under the names of a model, from those under the names that they have in its folder.

    A weight is joined as soon as all of its parts are there; they may come in any order, and are copied, as each may be
    overwritten by the next. The model may be without values.
    """
    if not num_experts(model):
        yield from weights
        return
    form, (renamings, converters, by_pattern) = form_of(model), _conversions(model, has_legacy=False)
    made_of = {name: [part for part, _ in form(name, weight)] for name, weight in model.named_parameters()}
    whole_of = {part: name for name, parts in made_of.items() for part in parts}
    there: dict[str, dict[str, Tensor]] = {}
    for part, weight in weights:
        name, pattern = whole_of.get(part, part), rename_source_key(part, renamings, converters)[1]
        if pattern is None:
            yield name, weight
            continue
        parts = there.setdefault(name, {})
        parts[part] = weight.clone()
        if len(parts) < len(made_of[name]):
            continue
        converter = deepcopy(by_pattern[pattern])
        for one in made_of[name]:  # experts in their order
            own = rename_source_key(one, renamings, converters)[1]
            assert own is not None
            converter.add_tensor(name, one, own, parts.pop(one))
        del there[name]
        yield from converter.convert(name, model=model, config=model.config).items()
