"""Exact attention of continuations to shared prompts, in parts that need no mask.

The softmax over the keys of a prompt and of a continuation is the sum of the two softmaxes, weighted by their
normalizers. The backward pass of flash attention (Dao et al., arXiv 2205.14135) computes the probabilities of a part
from a given output and normalizer; given those of the whole, it returns the gradients of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from leaderless.models.attention import LengthBuckets

Crossing = tuple[slice, slice]
"""The tokens of a prompt, and those of all continuations, which attend to it."""

flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
"""Output and normalizer for queries, keys and values [batch, heads, n, head_dim]; `torch` has no public name for it."""
flash_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, buckets: LengthBuckets, crossings: Sequence[Crossing], scale: float
) -> Tensor:
    """Compute causal attention within sequences, and attention of some tokens to a prompt too.

    Queries are [T, query_heads, head_dim], keys and values [T, kv_heads, head_dim]. Every token is in a bucket;
    those of continuations are in a crossing too, with their prompt.
    """
    output: Tensor = _Attention.apply(query, key, value, buckets, crossings, scale)  # type: ignore[no-untyped-call]
    return output


class _Context(FunctionCtx):
    """Everything the backward pass needs from the forward pass."""

    saved_tensors: tuple[Tensor, ...]
    buckets: LengthBuckets
    crossings: Sequence[Crossing]
    scale: float


class _Attention(torch.autograd.Function):
    """See `attend_on_cpu`."""

    @staticmethod
    def forward(
        ctx: _Context,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        buckets: LengthBuckets,
        crossings: Sequence[Crossing],
        scale: float,
    ) -> Tensor:
        results = [
            flash_on_cpu(*(bucket.take(values) for values in (query, key, value)), 0.0, True, scale=scale)
            for bucket in buckets
        ]
        output, normalizer = (buckets.join([result[kind] for result in results]) for kind in range(2))
        for prompt, rest in crossings:
            q, k, v = (heads_first(values) for values in (query[rest], key[prompt], value[prompt]))
            other, other_normalizer = map(tokens_first, flash_on_cpu(q, k, v, 0.0, False, scale=scale))
            whole = torch.logaddexp(normalizer[rest], other_normalizer)
            share = (other_normalizer - whole).exp_().unsqueeze(2).to(other.dtype)
            output[rest].lerp_(other, share)
            normalizer[rest] = whole
        ctx.save_for_backward(query, key, value, output, normalizer)
        ctx.buckets, ctx.crossings, ctx.scale = buckets, crossings, scale
        return output

    @staticmethod
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, output, normalizer = ctx.saved_tensors
        results = [
            flash_backward_on_cpu(
                bucket.take(grad_output, padding=0.0),
                *(bucket.take(values) for values in (query, key, value, output, normalizer)),
                0.0,
                True,
                scale=ctx.scale,
            )
            for bucket in ctx.buckets
        ]
        grads = tuple(ctx.buckets.join([result[kind] for result in results]) for kind in range(3))
        for prompt, rest in ctx.crossings:
            places = (rest, rest, prompt, prompt, rest, rest)
            whole = (grad_output, query, key, value, output, normalizer)
            taken = (heads_first(values[place]) for values, place in zip(whole, places, strict=True))
            result = flash_backward_on_cpu(*taken, 0.0, False, scale=ctx.scale)
            for grad, place, part in zip(grads, (rest, prompt, prompt), result, strict=True):
                grad[place] += tokens_first(part)
        return grads[0], grads[1], grads[2], None, None, None


def heads_first(values: Tensor) -> Tensor:
    """Turn [n, heads, ...] into [1, heads, n, ...]."""
    return values.unsqueeze(0).transpose(1, 2)


def tokens_first(values: Tensor) -> Tensor:
    """Turn [1, heads, n, ...] into [n, heads, ...]."""
    return values.transpose(1, 2).squeeze(0)
