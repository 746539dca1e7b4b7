"""Weights in the form in which they are saved: `transformers` joins weights of experts, and other software does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion

from leaderless.config.models import ModelConfig
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.models.parallel.expert import num_experts

SavedForm = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""From the name of a weight and the weight to the weights of which it is made in a folder."""


def unchanged(name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
    """A weight as it is."""
    return [(name, weight)]


def saved_form(config: ModelConfig, role: str) -> SavedForm:
    """How weights of a model are saved, one by one; a model without experts keeps them as they are."""
    return form_of(empty_causal_lm(config.model_copy(update={"lora": None}), role).model)


def form_of(model: PreTrainedModel) -> SavedForm:
    """How weights of a model are saved; see `saved_form`. The model itself may be without values."""
    if not num_experts(model):
        return unchanged
    known = {name for name, _ in model.named_parameters()}

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
    form, mapping = form_of(model), get_model_conversion_mapping(model, add_legacy=False)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
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
