"""Layers of `transformers` that do more than the attention that this package replaces, in packed passes."""

from __future__ import annotations

from transformers import PreTrainedModel

from leaderless.models.attention.indexed import choose_in_passes
from leaderless.models.attention.recurrence import read_in_passes
from leaderless.models.attention.recurrence_kernels import choose_by_device
from leaderless.models.attention.temperature import tune_in_passes


def compute_in_passes(model: PreTrainedModel) -> None:
    """Have the layers of a model compute each sequence of a packed pass as they compute it alone, from now on."""
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"  # Llama 4 has another name for its layers
    read_in_passes(model)
    choose_by_device(model)
    choose_in_passes(model)
    tune_in_passes(model)
