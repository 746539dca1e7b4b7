"""Layers that keep no activations for the backward pass, and compute them again there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from leaderless.config import RecipeError
from leaderless.models.attention.form import current_pass, passing
from leaderless.models.lora.dropout import pass_of

# Without the wrapper that keeps what is called within from being compiled.
_checkpoint = inspect.unwrap(checkpoint)


def recompute_layers(model: PreTrainedModel, key: str) -> None:
    """Have the layers of a model recompute their activations in each backward pass.

    The way of `transformers` needs layers in training mode, in which some of them draw random numbers.

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
        layer.forward = partial(_recompute, layer, layer.forward)


def _recompute(layer: nn.Module, forward: Callable[..., Tensor], *arguments: object, **named: object) -> Tensor:
    """Compute a layer, now and again in the backward pass, with the same dropout of adapters."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    current = pass_of(layer)
    dropout, now = current.dropout, current_pass()

    def compute(*arguments: object) -> Tensor:
        with current.drops(dropout), passing(now):
            return forward(*arguments, **named)

    result: Tensor = _checkpoint(compute, *arguments, use_reentrant=False)
    return result


def replace_forward(layer: nn.Module, change: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Replace what a layer computes by a function of it; where it recomputes its activations, it goes on doing so."""
    forward = layer.forward
    if isinstance(forward, partial) and forward.func is _recompute:
        layer.forward = partial(_recompute, layer, change(forward.args[1]))
    else:
        layer.forward = change(forward)
