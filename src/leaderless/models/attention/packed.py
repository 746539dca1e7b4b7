"""Attention over packed sequences, for any decoder of `transformers`.

Models are loaded with this package's attention function, which passes the queries, keys and values of each layer to the
`Attention` object of the forward pass. Training, prefill and decoding differ only in that object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from leaderless.models.attention import npu
from leaderless.models.uploads import placed

ATTENTION_NAME = "leaderless"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments that some models pass to their attention besides queries, keys and values."""
BUCKET_FILL = 0.75
"""Smallest ratio of the shortest to the longest sequence in one padded attention call."""


class Attention(Protocol):
    """Attention of the tokens of one forward pass."""

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Number of the layer, from 0.
            query: [T, query_heads, head_dim], all tokens of the pass.
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, head_dim].
            scale: Factor of the dot products.

        Returns:
            [T, query_heads, head_dim].
        """


def check_window(sliding_window: int | None, attention: Attention) -> None:
    """Refuse a pass in which a sequence is longer than the window of a model, if it has one, in tokens."""
    if sliding_window is not None and attention.longest > sliding_window:
        raise RuntimeError(
            f"a sequence of {attention.longest} tokens is longer than the model's sliding window of {sliding_window}, "
            "which is not supported: lower data.max_prompt_tokens or rollout.max_response_tokens"
        )


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention: Attention | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend on behalf of `transformers`, which calls this in each layer with [1, heads, T, head_dim] tensors."""
    if attention is None:
        raise RuntimeError("the layers do not pass on what their attention needs")
    if attention_mask is not None:
        raise RuntimeError("attention with a mask that the model makes is not supported")
    check_window(sliding_window, attention)
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise RuntimeError(f"attention with {name} is not supported")
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing < 0:
        raise RuntimeError("attention with values that are wider than queries is not supported")
    if missing:  # as in DeepSeek's compressed attention; kernels and stores want equal widths
        value = pad(value, (0, missing))
    return attention.attend(layer, query, key, value, scaling)[..., :width].unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


def keep_attention_apart() -> None:
    """Leave attention out of layers that `torch.compile` compiles, from now on: they call it as it is."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention_function))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class LengthBucket:
    """Sequences of similar length that are computed together, padded to the longest."""

    count: int
    longest: int
    tokens: Tensor
    """[count * longest] int64, tokens of the pass; padding repeats the last token of a sequence."""
    padding: Tensor
    """[p] int64, places of the padding in `tokens`."""

    def take(self, values: Tensor, padding: float | None = None) -> Tensor:
        """Lay out [T, heads, ...] queries, keys or values for one call, as [count, heads, longest, ...].

        Padding has the value of the sequence's last token unless another is given.
        """
        taken = values.index_select(0, self.tokens)
        if padding is not None:
            taken.index_fill_(0, self.padding, padding)
        return taken.view(self.count, self.longest, *values.shape[1:]).transpose(1, 2)


class LengthBuckets:
    """The sequences of a pass, sorted into buckets.

    Attributes:
        all: The buckets, the longest sequences first.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Plan calls for consecutive sequences, with lengths of at least 1."""
        sequences = torch.split(torch.arange(sum(lengths)), list(lengths))
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        grouped: list[list[Tensor]] = []
        for sequence in (sequences[i] for i in order):
            if grouped and len(sequence) >= BUCKET_FILL * len(grouped[-1][0]):
                grouped[-1].append(sequence)
            else:
                grouped.append([sequence])
        self.all: list[LengthBucket] = []
        place = torch.empty(sum(lengths), dtype=torch.int64)
        offset = 0
        for members in grouped:
            counts = torch.tensor([len(sequence) for sequence in members])[:, None]
            ends = counts.cumsum(0)
            step = torch.arange(len(members[0]))[None, :]
            tokens = torch.cat(members)[torch.minimum(ends - counts + step, ends - 1)].flatten()
            is_real = (step < counts).flatten()
            place[tokens[is_real]] = offset + is_real.nonzero().squeeze(1)
            padding = (~is_real).nonzero().squeeze(1)
            own = placed(tokens, device), placed(padding, device)
            self.all.append(LengthBucket(len(members), len(members[0]), *own))
            offset += len(tokens)
        self._place = placed(place, device)

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Put results of all buckets, [count, heads, longest, ...], into the order of the tokens: [T, heads, ...]."""
        flat = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
        return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, self._place)


class PackedAttention:
    """Causal attention within each of several consecutive sequences.

    Sequences of similar length are padded to a common length, for the attention only, and computed together. Padding
    comes after the real tokens, which never attend to it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.longest = max(lengths)
        self._buckets = LengthBuckets(lengths, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """Attend within each sequence, one padded call for each bucket of lengths."""
        parts = ([bucket.take(values) for values in (query, key, value)] for bucket in self._buckets.all)
        return self._buckets.join([attend_padded(q, k, v, None, scale) for q, k, v in parts])


def attend_padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute attention with heads in front, by a kernel that does not hold all scores at once.

    Queries are [n, query_heads, queries, head_dim], keys and values [n, kv_heads, keys, head_dim]. The mask, [n, 1,
    queries, keys] bool, says which keys each query attends to; without one it is causal.
    """
    if query.dtype.itemsize == 2 and (fused := npu.fusion_attention(query.device)) is not None:
        return npu.attend_padded(fused, query, key, value, mask, scale)
    is_grouped = query.shape[1] != key.shape[1]
    # Of an accelerator's fused kernels only flash attention supports groups of heads, and it takes neither float32 nor
    # a mask. Without a fused kernel all scores would be held until the backward pass.
    if is_grouped and query.device.type != "cpu" and (mask is not None or query.dtype == torch.float32):
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        is_grouped = False
    return scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


Crossing = tuple[slice, slice]
"""The tokens of a prompt, and the tokens of all continuations, which attend to it."""

flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
"""Output and normalizer for queries, keys and values [batch, heads, n, head_dim]; `torch` has no public name for it."""
flash_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, buckets: LengthBuckets, crossings: Sequence[Crossing], scale: float
) -> Tensor:
    """Compute causal attention within sequences, and attention of some tokens to a prompt too.

    Queries are [T, query_heads, head_dim], keys and values [T, kv_heads, head_dim]. Every token is in a bucket;
    tokens of continuations are in a crossing too, with their prompt.
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
    """Attention by the fused kernel of the CPU, with its gradient; the arguments are described at `attend_on_cpu`."""

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
            for bucket in buckets.all
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
            for bucket in ctx.buckets.all
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
