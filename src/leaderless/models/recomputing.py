"""Layers that keep no activations for the backward pass, and compute them again there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from leaderless.config import RecipeError


def recompute_layers(model: PreTrainedModel, key: str) -> None:
    """Have the layers of a model recompute their activations while they are in training mode.

    Their mode decides about nothing else: in both passes they compute as in evaluation mode.

    Args:
        model: Model whose layers are changed.
        key: Key of its setting, for errors.

    Raises:
        RecipeError: The model has no such layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise RecipeError.at(
            f"{key}.gradient_checkpointing",
            f"models of type {model.config.model_type} cannot recompute activations: set it to false",
        )
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(_recompute, layer)  # noqa: SLF001


def recomputed_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the layers that `recompute_layers` has changed."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            yield module


def _recompute(layer: nn.Module, function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Compute a layer, now and in the backward pass."""

    def evaluate(*arguments: object) -> Tensor:
        layer.training = False
        try:
            return function(*arguments)
        finally:
            layer.training = True

    result: Tensor = checkpoint(evaluate, *arguments, use_reentrant=False)
    return result
