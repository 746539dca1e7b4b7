"""Attention to some of the keys of a pass, with normalizers by which results for others are joined, and its gradients.

The backward pass takes output and normalizers over all keys, and returns what these keys add to the gradients (Dao et
al., arXiv 2205.14135). On a CPU, torch has kernels for both; elsewhere they are products of matrices, a block of
queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.models.attention.packed import flash_backward_on_cpu, flash_on_cpu

BLOCK_SCORES = 1 << 24
"""Most scores of a block of queries in all heads."""


class Form(NamedTuple):
    """The factor of the dot products, and whether attention is causal, with as many keys as queries."""

    scale: float
    is_causal: bool = False


def attend_some(form: Form, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute output and normalizers, [n, query_heads, queries], the latter in at least float32.

    Queries are [n, query_heads, queries, head_dim], keys and values [n, kv_heads, keys, head_dim].
    """
    if query.device.type == "cpu":
        output, normalizers = flash_on_cpu(query, key, value, 0.0, form.is_causal, scale=form.scale)
        return output, normalizers
    return attend_by_products(form, query, key, value)


def gradients_of_some(
    form: Form, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normalizers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what some keys and values add to the gradient of the queries, and their own; see `attend_some`."""
    whole = grad_output, query, key, value, output, normalizers
    if query.device.type == "cpu":
        q, k, v = flash_backward_on_cpu(*whole, 0.0, form.is_causal, scale=form.scale)
        return q, k, v
    return gradients_by_products(form, *whole)


def attend_by_products(form: Form, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the results of `attend_some` by matrix products, block by block of queries."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    output, normalizers = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=dtype)
    times = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(times, 1).to(dtype) for tensor in (key, value))
    for block in _blocks(query, key):
        scores = _scores(form, query, key, block)
        normalizers[:, :, block] = scores.logsumexp(-1)
        output[:, :, block] = (scores - normalizers[:, :, block, None]).exp_() @ value
    return output, normalizers


def gradients_by_products(
    form: Form, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normalizers: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `gradients_of_some` by matrix products, block by block of queries."""
    dtype, times = normalizers.dtype, query.shape[1] // key.shape[1]
    wide_key, wide_value = (tensor.repeat_interleave(times, 1).to(dtype) for tensor in (key, value))
    grad_query, grad_key, grad_value = (torch.zeros_like(one, dtype=dtype) for one in (query, wide_key, wide_value))
    for block in _blocks(query, key):
        scores = _scores(form, query, wide_key, block)
        probabilities = (scores - normalizers[:, :, block, None]).exp_()
        grad = grad_output[:, :, block].to(dtype)
        grad_value += probabilities.transpose(2, 3) @ grad
        inner = (grad * output[:, :, block]).sum(-1, keepdim=True)
        grad_scores = (grad @ wide_value.transpose(2, 3) - inner).mul_(probabilities).mul_(form.scale)
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


def _scores(form: Form, query: Tensor, key: Tensor, block: slice) -> Tensor:
    """Scores of a block of queries; -inf where a key comes later."""
    scores = (query[:, :, block].to(key.dtype) @ key.transpose(2, 3)).mul_(form.scale)
    if form.is_causal:
        places = torch.arange(key.shape[2], device=key.device)
        scores.masked_fill_(places > places[block, None], -torch.inf)
    return scores
