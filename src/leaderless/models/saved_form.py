"""Weights in the form in which they are saved: `transformers` joins those of experts, and other software does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from leaderless.config.models import ModelConfig
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.models.experts import num_experts

SavedForm = Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
"""From the name of a weight and the weight to those of which it is made in a folder."""


def unchanged(name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
    """A weight as it is."""
    return [(name, weight)]


def saved_form(config: ModelConfig, role: str) -> SavedForm:
    """How weights of a model are saved, one by one; those of a model without experts are left as they are."""
    model = empty_causal_lm(config.model_copy(update={"lora": None}), role).model
    if not num_experts(model):
        return unchanged
    known = {name for name, _ in model.named_parameters()}

    def convert(name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
        return revert_weight_conversion(model, {name: weight}).items() if name in known else unchanged(name, weight)

    return convert
