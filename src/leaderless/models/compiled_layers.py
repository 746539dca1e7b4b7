"""Decoder layers of which `torch.compile` makes few kernels, except for their attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.modeling_layers import GradientCheckpointingLayer

from leaderless.distributed.errors import is_out_of_memory
from leaderless.models.attention.packed import keep_attention_apart
from leaderless.models.decoder import Decoder
from leaderless.models.gradient_checkpointing import replace_forward
from leaderless.models.parallel.expert import num_experts

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

BACKEND = "inductor"
"""Compiler that turns graphs into kernels; tests have others, which need no compiler."""
MAX_VARIANTS = 64
"""Kernels that one function may have: for passes with and without a gradient, types, adapters, and several models."""
TOLERANCE = 0.05
"""Relative difference of compiled numbers in bfloat16 that is rounding."""


def why_not_compiled(model: Decoder, *, has_dropout: bool) -> str:
    """Why the layers of a model cannot be compiled; empty if they can.

    Layers that ranks divide exchange messages within, experts have shapes that depend on numbers, and dropout of
    adapters depends on what is computed besides.
    """
    if model.tensor_parallel is not None:
        return "ranks divide its layers along tp"
    if model.expert_parallel is not None or num_experts(model):
        return "it has experts"
    if has_dropout:
        return "its adapters have dropout"
    return "" if _layers(model) else f"models of type {model.model.config.model_type} have no layers of a known kind"


def compile_layers(model: Decoder) -> None:
    """Compile the decoder layers of a model for any number of tokens, with and without a gradient.

    Attention stays as it is: each layer becomes a graph before it and one after it, which all layers share. Layers that
    compute their activations again do so with the same kernels.
    """
    keep_attention_apart()
    for layer in _layers(model):
        replace_forward(layer, partial(compiled, backend=BACKEND))


def compiled(
    function: Callable[Arguments, Result], backend: str | Callable[..., Any] = "inductor"
) -> Callable[Arguments, Result]:
    """Compile a function for any number of tokens, with kernels for each of several models that share it."""
    limit: dict[str, Any] = {}
    if "recompile_limit" in signature(torch.compile).parameters:
        # In torch 2.13 a setting of Dynamo belongs to a thread, and backward passes of a GPU have their own threads.
        limit = {"recompile_limit": MAX_VARIANTS}
    else:
        from torch._dynamo import config as dynamo

        dynamo.recompile_limit = max(MAX_VARIANTS, dynamo.recompile_limit)
    return torch.compile(function, dynamic=True, backend=backend, **limit)


def compiler_failure(device: torch.device, dtype: torch.dtype) -> str:
    """Why `torch.compile` does not work on a device, by a small function and its gradient; empty if it does.

    Compilers fail in many ways: no C compiler, a driver that is too old, a full disk. A backward pass is compiled when
    it is first needed, in the middle of an update, so that it is tried before.
    """
    generator = torch.Generator().manual_seed(0)
    values, weight = (torch.randn(16, 16, generator=generator).to(device, dtype) for _ in range(2))
    try:
        found, expected = (
            _with_gradient(function, values, weight)
            for function in (torch.compile(_example, dynamic=True, backend=BACKEND), _example)
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    for one, other in zip(found, expected, strict=True):
        difference, size = float((one - other).float().norm()), float(other.float().norm())
        if not difference <= TOLERANCE * size:
            return f"its results differ by {difference / size:.1%}"
    return ""


def _layers(model: Decoder) -> list[nn.Module]:
    """The decoder layers of the part of a model that reads text."""
    return [one for one in getattr(model.text_model, "layers", ()) if isinstance(one, GradientCheckpointingLayer)]


def _example(values: Tensor, weight: Tensor) -> Tensor:
    """Parts of layers: a norm, a product, and an activation."""
    scale = values.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    return values + silu(linear((values.float() * scale).to(values.dtype), weight)) * values


def _with_gradient(
    function: Callable[[Tensor, Tensor], Tensor], values: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a function, and the gradients of its sum."""
    values, weight = (one.detach().clone().requires_grad_() for one in (values, weight))
    result = function(values, weight)
    by_values, by_weight = torch.autograd.grad(result.sum(), (values, weight))
    return result.detach(), by_values, by_weight
