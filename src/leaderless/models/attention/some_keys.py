"""Attention to some of the keys, with normalizers by which results for several such parts are joined, exactly.

The backward pass of a part takes output and normalizers over all keys, and returns what these keys add to the gradients
(Dao et al., "FlashAttention", arXiv 2205.14135). On a CPU, torch has kernels for both; elsewhere, and for scores with a
bound, they are products of matrices, a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.models.attention.blocks import LengthBuckets
from leaderless.models.attention.form import AttentionForm

BLOCK_SCORES = 1 << 24
"""Most scores of a block of queries in all heads."""

flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
"""Output and normalizer for queries, keys and values [batch, heads, n, head_dim]; `torch` has no public name for it."""
flash_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class Crossing(NamedTuple):
    """Tokens that attend to tokens before their block, in one call.

    Attributes:
        keys: Places of the latter: consecutive ones, or [n or 1, keys] int64 on the device, different ones or the same
            for all.
        queries: Places of the former: consecutive ones, or [n, queries] int64 on the device.
        is_causal: Whether queries see the keys up to their own place in the call alone.
    """

    keys: slice | Tensor
    queries: slice | Tensor
    is_causal: bool = False

    def attend(
        self,
        form: AttentionForm,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        normalizers: Tensor,
    ) -> None:
        """Join attention to these keys to results, [T, query_heads, head_dim], and normalizers, in place."""
        q, rest = _take(query, self.queries), self.queries
        k, v = (_take(values, self.keys).expand(len(q), -1, -1, -1) for values in (key, value))
        other, other_normalizers = (_put(one, rest) for one in attend_some(form, q, k, v, is_causal=self.is_causal))
        whole = torch.logaddexp(normalizers[rest], other_normalizers)
        share = (other_normalizers - whole).exp_().unsqueeze(-1).to(output.dtype)
        if isinstance(rest, slice):
            output[rest].lerp_(other.to(output.dtype), share)
        else:
            output[rest] = output[rest].lerp_(other.to(output.dtype), share)
        normalizers[rest] = whole

    def add_gradients(
        self,
        form: AttentionForm,
        grad_output: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        normalizers: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Add what these keys contribute to the gradients of queries, keys and values, by the results for all keys."""
        gradient, q, *joined = (_take(values, self.queries) for values in (grad_output, query, output, normalizers))
        k, v = (_take(values, self.keys).expand(len(q), -1, -1, -1) for values in (key, value))
        parts = gradients_of_some(form, gradient, q, k, v, *joined, is_causal=self.is_causal)
        for grad, places, part in zip(grads, (self.queries, self.keys, self.keys), parts, strict=True):
            grad[places] += _put(part, places)


def _take(values: Tensor, places: slice | Tensor) -> Tensor:
    """Lay out [T, heads, ...] values of some places for a call, as [n, heads, tokens, ...]."""
    taken = values[places]
    return (taken.unsqueeze(0) if isinstance(places, slice) else taken).transpose(1, 2)


def _put(values: Tensor, places: slice | Tensor) -> Tensor:
    """Turn results of a call, [n, heads, tokens, ...], into those of the places: the sum where all have the same."""
    if isinstance(places, slice):
        return values.transpose(1, 2).squeeze(0)
    if len(places) < len(values):
        values = values.sum(0, keepdim=True, dtype=torch.promote_types(values.dtype, torch.float32)).to(values.dtype)
    return values.transpose(1, 2)


def attend_within(
    form: AttentionForm,
    buckets: LengthBuckets,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Iterable[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within sequences: [T, query_heads, head_dim] results, and [T, query_heads] normalizers.

    It is causal unless there are masks, one for each bucket; see `attend_some`.
    """
    results = [
        attend_some(form, *(bucket.take(one) for one in (query, key, value)), mask=mask, is_causal=mask is None)
        for bucket, mask in zip(buckets.all, repeat(None) if masks is None else masks, strict=False)
    ]
    output, normalizers = (buckets.join([result[kind] for result in results]) for kind in range(2))
    return output, normalizers


def gradients_within(  # noqa: PLR0913, PLR0917
    form: AttentionForm,
    buckets: LengthBuckets,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    masks: Iterable[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the keys of their own sequences add to the gradients, by the results for all keys."""
    results = [
        gradients_of_some(
            form,
            bucket.take(grad_output, padding=0.0),
            *(bucket.take(values) for values in (query, key, value, output, normalizers)),
            mask=mask,
            is_causal=mask is None,
        )
        for bucket, mask in zip(buckets.all, repeat(None) if masks is None else masks, strict=False)
    ]
    of_query, of_key, of_value = (buckets.join([result[kind] for result in results]) for kind in range(3))
    return of_query, of_key, of_value


def attend_some(
    form: AttentionForm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute output and normalizers, [n, query_heads, queries], the latter in at least float32.

    The sink of the form is left out: it is added once, to the joined result.

    Args:
        form: Scale and bound of the scores.
        query: [n, query_heads, queries, head_dim].
        key: [n, kv_heads, keys, head_dim].
        value: [n, kv_heads, keys, head_dim].
        mask: [n or 1, 1, queries, keys] float32, added to scores; each query has to see a key.
        is_causal: Whether queries see the keys up to their own place alone; there are as many keys as queries then.
    """
    if query.device.type == "cpu" and form.kind.softcap is None:
        mask = None if mask is None else mask.to(query.dtype)
        output, normalizers = flash_on_cpu(query, key, value, 0.0, is_causal, attn_mask=mask, scale=form.scale)
        return output, normalizers
    return attend_by_products(form, query, key, value, mask=mask, is_causal=is_causal)


def gradients_of_some(  # noqa: PLR0913
    form: AttentionForm,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what some keys and values add to the gradient of the queries, and their own; see `attend_some`."""
    whole = grad_output, query, key, value, output, normalizers
    if query.device.type == "cpu" and form.kind.softcap is None:
        mask = None if mask is None else mask.to(query.dtype)
        q, k, v = flash_backward_on_cpu(*whole, 0.0, is_causal, attn_mask=mask, scale=form.scale)
        return q, k, v
    return gradients_by_products(form, *whole, mask=mask, is_causal=is_causal)


def attend_by_products(
    form: AttentionForm,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the results of `attend_some` by matrix products, block by block of queries."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    output, normalizers = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=dtype)
    times = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(times, 1).to(dtype) for tensor in (key, value))
    for block in _blocks(query, key):
        scores = _masked(_scores(form, query, key, block), mask, block, is_causal=is_causal)
        normalizers[:, :, block] = scores.logsumexp(-1)
        output[:, :, block] = (scores - normalizers[:, :, block, None]).exp_() @ value
    return output, normalizers


def gradients_by_products(  # noqa: PLR0913
    form: AttentionForm,
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normalizers: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `gradients_of_some` by matrix products, block by block of queries.

    The derivative of a bounded score c tanh(s / c) is 1 - (c tanh(s / c) / c)^2.
    """
    dtype, times = normalizers.dtype, query.shape[1] // key.shape[1]
    wide_key, wide_value = (tensor.repeat_interleave(times, 1).to(dtype) for tensor in (key, value))
    grad_query, grad_key, grad_value = (torch.zeros_like(one, dtype=dtype) for one in (query, wide_key, wide_value))
    for block in _blocks(query, key):
        bounded = _scores(form, query, wide_key, block)
        scores = _masked(bounded, mask, block, is_causal=is_causal)
        probabilities = (scores - normalizers[:, :, block, None]).exp_()
        grad = grad_output[:, :, block].to(dtype)
        grad_value += probabilities.transpose(2, 3) @ grad
        inner = (grad * output[:, :, block]).sum(-1, keepdim=True)
        grad_scores = (grad @ wide_value.transpose(2, 3) - inner).mul_(probabilities).mul_(form.scale)
        if form.kind.softcap is not None:
            grad_scores *= 1 - (bounded / form.kind.softcap) ** 2
        grad_query[:, :, block] = grad_scores @ wide_key
        grad_key += grad_scores.transpose(2, 3) @ query[:, :, block].to(dtype)
    of_key, of_value = (
        grad.view(len(grad), -1, times, *grad.shape[2:]).sum(2).to(key.dtype) for grad in (grad_key, grad_value)
    )
    return grad_query.to(query.dtype), of_key, of_value


def _blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Blocks of queries, each with few enough scores."""
    size = max(1, BLOCK_SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    for first in range(0, query.shape[2], size):
        yield slice(first, min(first + size, query.shape[2]))


def _scores(form: AttentionForm, query: Tensor, key: Tensor, block: slice) -> Tensor:
    """Scores of a block of queries with all keys."""
    scores = (query[:, :, block].to(key.dtype) @ key.transpose(2, 3)).mul_(form.scale)
    return scores if form.kind.softcap is None else bounded(scores, form.kind.softcap)


def bounded(scores: Tensor, softcap: float) -> Tensor:
    """Bound scores by c tanh(s / c), in place."""
    return scores.div_(softcap).tanh_().mul_(softcap)


def _masked(scores: Tensor, mask: Tensor | None, block: slice, *, is_causal: bool) -> Tensor:
    """Scores that are minus infinity where a key is not seen."""
    if mask is not None:
        return scores + mask[:, :, block]
    if is_causal:
        places = torch.arange(scores.shape[3], device=scores.device)
        return scores.masked_fill(places > places[block, None], -torch.inf)
    return scores
