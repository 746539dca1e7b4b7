"""Attention over packed sequences, for any decoder of `transformers`.

Models are loaded with this package's attention function, which passes the queries, keys and values of each layer to the
`Attention` object of the forward pass. Training, prefill and decoding differ only in that object.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from typing_extensions import override

from leaderless.models.attention import npu
from leaderless.models.attention.blocks import LengthBuckets, PromptBlock
from leaderless.models.attention.form import AttentionForm, current_pass
from leaderless.models.attention.indexed import KeyChoice, SequenceMask
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.recurrence import Mixer
from leaderless.models.attention.temperature import TunedAttention

ATTENTION_NAME = "leaderless"
_UNSUPPORTED = ("position_bias",)
"""Arguments that some models pass to their attention besides queries, keys and values."""


class Attention(Protocol):
    """Attention of the tokens of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Compute the attention of one layer.

        Args:
            layer: Number of the layer, from 0.
            query: [T, query_heads, head_dim], all tokens of the pass.
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, head_dim].
            form: Form of the attention.

        Returns:
            [T, query_heads, head_dim].
        """

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Compute a layer that reads by recurrence, sequence by sequence.

        Args:
            layer: Number of the layer, from 0.
            mixer: Layer.
            hidden: [T, hidden_size], all tokens of the pass.

        Returns:
            [T, hidden_size].
        """


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | SequenceMask | KeyChoice | None,
    *,
    scaling: float,
    s_aux: Tensor | None = None,
    indices: KeyChoice | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend on behalf of `transformers`, which calls this in each layer with [1, heads, T, head_dim] tensors."""
    current = current_pass()
    if current is None:
        raise RuntimeError("the attention of this package was called outside of a pass")
    if isinstance(attention_mask, Tensor):
        raise RuntimeError("attention with a mask that the model makes is not supported")
    chosen = attention_mask if isinstance(attention_mask, KeyChoice) else indices
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise RuntimeError(f"attention with {name} is not supported")
    layer = module.layer_idx
    assert isinstance(layer, int)
    kind = current.kinds[layer]
    if isinstance(chosen, KeyChoice) != kind.is_indexed:
        raise RuntimeError(f"layer {layer} has an indexer of an unknown kind, or the description does not name it")
    for name, described in (("sliding_window", kind.window), ("softcap", kind.softcap)):
        if (found := kwargs.get(name)) is not None and found != described:
            raise RuntimeError(f"layer {layer} has {name}={found}, but the description of the model says {described}")
    if isinstance(module.forward, TunedAttention):
        query = module.forward.tuned(query, current.positions)
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    width, missing = value.shape[-1], query.shape[-1] - value.shape[-1]
    if missing < 0:
        raise RuntimeError("attention with values that are wider than queries is not supported")
    if missing:  # as in DeepSeek's compressed attention; kernels and stores want equal widths
        value = pad(value, (0, missing))
    form = AttentionForm(scaling, kind, s_aux, chosen)
    return current.attention.attend(layer, query, key, value, form)[..., :width].unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


def keep_attention_apart() -> None:
    """Leave attention out of layers that `torch.compile` compiles, from now on: they call it as it is."""
    AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(_attention_function))  # type: ignore[no-untyped-call]


class PackedAttention(JoinedAttention):
    """Causal attention within each of several consecutive sequences.

    Sequences of similar length are padded to a common length, for the attention only, and computed together. Padding
    comes after the real tokens, which never attend to it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Plan calls for sequences of some lengths."""
        ends = [*accumulate(lengths)]
        blocks = [PromptBlock((), range(end - own, end)) for own, end in zip(lengths, ends, strict=True)]
        super().__init__(blocks, device)
        self._longest = max(lengths)
        self._buckets = LengthBuckets(lengths, device)  # now, as part of what a pass sends to its device

    @override
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        if not form.is_plain_for(self._longest):
            return super().attend(layer, query, key, value, form)
        parts = ([bucket.take(values) for values in (query, key, value)] for bucket in self._buckets.all)
        return self._buckets.join([attend_padded(q, k, v, None, form.scale) for q, k, v in parts])


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
