"""Context parallelism of any size: keys and values go around a ring of ranks, and each attends to what it has.

The tokens of a pass are cut into twice as many chunks as there are ranks, and each rank has one from the front and one
from the back, so that causal attention is as much work for each (zigzag). Chunks of keys and values pass from rank to
rank; results for them are joined by their normalizers (Liu et al., "Ring Attention with Blockwise Transformers",
arXiv 2310.01889), which is exact. In the backward pass their gradients go around with them, and end where they belong.

Attention to some of the keys has normalizers for that. Its backward pass takes output and normalizers over all keys,
and returns what these keys add to the gradients (Dao et al., arXiv 2205.14135). On a CPU, torch has kernels for both;
elsewhere they are products of matrices, a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from leaderless.distributed.in_flight import PendingMessage
from leaderless.models.attention.packed import (
    Attention,
    LengthBuckets,
    flash_backward_on_cpu,
    flash_on_cpu,
    heads_first,
    tokens_first,
)
from leaderless.models.attention.shared_prompts import Family, blocks_of
from leaderless.models.parallel.context import ContextParallel

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


ROUND = "keys and values of other parts of a pass"


class RingParallel(ContextParallel):
    """The ranks that divide the tokens of a pass into parts of equal size, of which each has two chunks."""

    @override
    def chunks(self, place: int) -> tuple[int, ...]:
        return place, 2 * self.size - 1 - place

    @override
    def attention(self, families: Sequence[Family], device: torch.device, compute_dtype: torch.dtype) -> Attention:
        return RingAttention(families, self, device)


class Rectangle(NamedTuple):
    """Tokens of a rank that each attend to all of some tokens of a rank, by their places among each rank's tokens."""

    queries: slice
    keys: slice


class RingAttention:
    """Attention of a rank's tokens to the tokens of all ranks, in parts that need no mask."""

    def __init__(self, families: Sequence[Family], ranks: RingParallel, device: torch.device) -> None:
        """Plan the calls for consecutive families, whose tokens fill all chunks."""
        self.longest = max(family.longest for family in families)
        self.peers, self.place = ranks.peers, ranks.place
        length = sum(family.num_tokens for family in families) // (2 * ranks.size)
        own = ranks.chunks(ranks.place)
        pieces = [_cut(block.own, chunk, length) for chunk in own for block in blocks_of(families)]
        self.diagonal = LengthBuckets([len(piece) for piece in pieces if piece], device)
        self.rectangles = [
            [
                _rectangle(queries, keys, (i, a), (j, b), length)
                for i, a in enumerate(own)
                for j, b in enumerate(ranks.chunks(place))
                for queries, keys in _pairs(families, a, b, length)
                if queries and keys
            ]
            for place in range(ranks.size)
        ]

    def around(self, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The values of each rank by its place, from this one's on, while the next rank's are on their way."""
        for step in range(self.peers.size):
            passing = self.peers.pass_on(values, ROUND) if step < self.peers.size - 1 else None
            yield (self.place - step) % self.peers.size, values
            if passing is not None:
                values = passing.wait()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """Attend from this rank's tokens, of which there are T, to the keys that pass by from rank to rank."""
        output: Tensor = _Ring.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return output


def _cut(tokens: range, chunk: int, length: int) -> range:
    """The part of some tokens that is in a chunk."""
    return range(max(tokens.start, chunk * length), min(tokens.stop, (chunk + 1) * length))


def _pairs(families: Sequence[Family], a: int, b: int, length: int) -> Iterator[tuple[range, range]]:
    """Queries in chunk `a` and keys in chunk `b` that each of them sees, without its own piece of a block."""
    if b > a:
        return
    begin = 0
    for family in families:
        end, middle = begin + family.num_tokens, begin + family.prompt
        if len(family.continuations) > 1:
            yield _cut(range(middle, end), a, length), _cut(range(begin, middle), b, length)
        begin = end
    if b < a:
        for block in blocks_of(families):
            yield _cut(block.own, a, length), _cut(block.own, b, length)


def _rectangle(
    queries: range, keys: range, of_query: tuple[int, int], of_key: tuple[int, int], length: int
) -> Rectangle:
    """Tokens of two chunks, each given by its place among the chunks of its rank and its number."""

    def local(tokens: range, place: int, chunk: int) -> slice:
        offset = (place - chunk) * length
        return slice(tokens.start + offset, tokens.stop + offset)

    return Rectangle(local(queries, *of_query), local(keys, *of_key))


class _Context(FunctionCtx):
    """Everything the backward pass needs from the forward pass."""

    saved_tensors: tuple[Tensor, ...]
    plan: RingAttention
    scale: float


class _Ring(torch.autograd.Function):
    """Attention round the ring, and its gradient; results are added up in at least float32."""

    @staticmethod
    def forward(ctx: _Context, query: Tensor, key: Tensor, value: Tensor, plan: RingAttention, scale: float) -> Tensor:
        diagonal = plan.diagonal
        results = [
            attend_some(Form(scale, is_causal=True), *(bucket.take(values) for values in (query, key, value)))
            for bucket in diagonal.all
        ]
        output, normalizers = (diagonal.join([result[kind] for result in results]) for kind in range(2))
        output = output.to(normalizers.dtype)
        for place, pair in plan.around(torch.stack([key, value])):
            for own, other in plan.rectangles[place]:
                q, k, v = map(heads_first, (query[own], pair[0, other], pair[1, other]))
                part, part_normalizers = map(tokens_first, attend_some(Form(scale), q, k, v))
                whole = torch.logaddexp(normalizers[own], part_normalizers)
                output[own].lerp_(part.to(output.dtype), (part_normalizers - whole).exp_().unsqueeze(2))
                normalizers[own] = whole
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: _Context, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, output, normalizers = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        results = [
            gradients_of_some(
                Form(scale, is_causal=True),
                bucket.take(grad_output, padding=0.0),
                *(bucket.take(values) for values in (query, key, value, output, normalizers)),
            )
            for bucket in plan.diagonal.all
        ]
        first = [plan.diagonal.join([result[kind] for result in results]) for kind in range(3)]
        grad_query, grad_pair = first[0].to(normalizers.dtype), torch.stack(first[1:]).to(normalizers.dtype)
        passing: PendingMessage | None = None
        for place, pair in plan.around(torch.stack([key, value])):
            if passing is not None:
                grad_pair = passing.wait()
            for own, other in plan.rectangles[place]:
                ours = (heads_first(values[own]) for values in (output, normalizers))
                q, k, v, grad = map(heads_first, (query[own], pair[0, other], pair[1, other], grad_output[own]))
                parts = gradients_of_some(Form(scale), grad, q, k, v, *ours)
                of_query, of_key, of_value = map(tokens_first, parts)
                grad_query[own] += of_query
                grad_pair[0, other] += of_key
                grad_pair[1, other] += of_value
            passing = plan.peers.pass_on(grad_pair, ROUND)
        assert passing is not None
        of_key, of_value = passing.wait().to(key.dtype)
        return grad_query.to(query.dtype), of_key, of_value, None, None
