"""Attention over packed sequences, for any decoder of `transformers`.

Models are loaded with an attention function of ours, which hands queries, keys and values of each layer to the
`Attention` object that came along with the forward pass. Training, prefill and decoding differ in that object alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "leaderless"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some models ask of their attention besides queries, keys and values."""
BUCKET_FILL = 0.75
"""Sequences share one padded attention call when the shortest is at least this fraction of the longest."""


class Attention(Protocol):
    """How the tokens of one forward pass attend."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """The attention of one layer.

        Args:
            layer: Its number, from 0.
            query: [T, query_heads, head_dim], all tokens of the pass.
            key: [T, kv_heads, head_dim].
            value: [T, kv_heads, head_dim].
            scale: Of the dot products.

        Returns:
            [T, query_heads, head_dim].
        """


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float,
    attention: Attention,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What `transformers` calls in each layer, with [1, heads, T, head_dim] tensors."""
    if sliding_window is not None and attention.longest > sliding_window:
        raise RuntimeError(
            f"a sequence of {attention.longest} tokens is longer than the model's sliding window of {sliding_window}, "
            "which is not supported: lower data.max_prompt_tokens or rollout.max_response_tokens"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise RuntimeError(f"attention with {name} is not supported")
    layer = module.layer_idx
    assert isinstance(layer, int)
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return attention.attend(layer, query, key, value, scaling).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention_function)


class PackedAttention:
    """Causal attention within each of several sequences that lie one behind the other.

    Sequences of similar length are padded to a common one, for the attention only, and computed together.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Plan the calls.

        Args:
            lengths: Of the sequences, each at least 1.
            device: Where the pass runs.
        """
        self.longest = max(lengths)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        buckets: list[list[int]] = []
        for sequence in order:
            if buckets and lengths[sequence] >= BUCKET_FILL * lengths[buckets[-1][0]]:
                buckets[-1].append(sequence)
            else:
                buckets.append([sequence])
        self._buckets: list[tuple[int, int, Tensor]] = []
        place = torch.empty(starts[-1], dtype=torch.int64)
        offset = 0
        for bucket in buckets:
            longest = lengths[bucket[0]]
            begin = torch.tensor([starts[i] for i in bucket])[:, None]
            length = torch.tensor([lengths[i] for i in bucket])[:, None]
            step = torch.arange(longest)[None, :]
            tokens = begin + torch.minimum(step, length - 1)
            real = step < length
            place[tokens[real]] = offset + torch.arange(len(bucket) * longest).view(len(bucket), longest)[real]
            self._buckets.append((len(bucket), longest, tokens.flatten().to(device)))
            offset += len(bucket) * longest
        self._place = place.to(device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """See `Attention`. Padding lies behind the real tokens, which causal attention never looks at."""
        repeat = query.shape[1] // key.shape[1]
        outputs: list[Tensor] = []
        for count, longest, tokens in self._buckets:
            q, k, v = (
                tensor.index_select(0, tokens).view(count, longest, *tensor.shape[1:]).transpose(1, 2)
                for tensor in (query, key, value)
            )
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=repeat > 1)
            outputs.append(output.transpose(1, 2).reshape(count * longest, *query.shape[1:]))
        return torch.cat(outputs).index_select(0, self._place)
