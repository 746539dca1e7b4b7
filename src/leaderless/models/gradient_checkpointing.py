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
from leaderless.models.input_memory import InputMemory
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
        layer.forward = partial(_recompute, layer, layer.forward, None)


def offload_inputs(model: nn.Module, memory: InputMemory) -> None:
    """Have the layers that recompute their activations keep their inputs in some memory until then."""
    for layer in model.modules():
        if (inner := _recomputed_by(layer.forward)) is not None:
            layer.forward = partial(_recompute, layer, inner, memory)


def _recomputed_by(forward: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """What a layer computes again; None if it keeps its activations."""
    return forward.args[1] if isinstance(forward, partial) and forward.func is _recompute else None


def _recompute(
    layer: nn.Module,
    forward: Callable[..., Tensor],
    memory: InputMemory | None,
    *arguments: object,
    **named: object,
) -> Tensor:
    """Compute a layer, now and again in the backward pass, with the same dropout of adapters.

    With a memory, the first argument is kept there in between. `torch` would hold it as long as what it calls again.
    """
    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    current = pass_of(layer)
    dropout, now = current.dropout, current_pass()

    def compute(*arguments: object) -> Tensor:
        with current.drops(dropout), passing(now):
            return forward(*arguments, **named)

    first = arguments[0] if arguments else None
    if memory is None or not isinstance(first, Tensor):
        result: Tensor = _checkpoint(compute, *arguments, use_reentrant=False)
        return result
    here, kept, has_gradient = [first], memory.keep(first), first.requires_grad

    def compute_with_first(*others: object) -> Tensor:
        return compute(here.pop() if here else kept.fetch().requires_grad_(has_gradient), *others)

    found: Tensor = _checkpoint(compute_with_first, *arguments[1:], use_reentrant=False)
    return found


def replace_forward(layer: nn.Module, change: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
    """Replace what a layer computes by a function of it; where it recomputes its activations, it goes on doing so."""
    forward = layer.forward
    if isinstance(forward, partial) and forward.func is _recompute:
        layer.forward = partial(_recompute, layer, change(forward.args[1]), forward.args[2])
    else:
        layer.forward = change(forward)
