"""Attention over packed sequences, for any decoder of `transformers`.

Models are loaded with an attention function of ours, which hands queries, keys and values of each layer to the
`Attention` object that came along with the forward pass. Training, prefill and decoding differ in that object alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length that are computed together, padded to the longest.

    Attributes:
        count: Sequences.
        longest: Their common length.
        tokens: [count * longest] int64; the last token of a sequence is repeated to the common length.
        padding: [p] int64, which of them are such repetitions.
    """

    count: int
    longest: int
    tokens: Tensor
    padding: Tensor

    def take(self, values: Tensor, padding: float | None = None) -> Tensor:
        """Lay out queries, keys or values for one call.

        Args:
            values: [T, heads, ...].
            padding: Value of what is padded; without it, that of the last token.

        Returns:
            [count, heads, longest, ...].
        """
        taken = values.index_select(0, self.tokens)
        if padding is not None:
            taken.index_fill_(0, self.padding, padding)
        return taken.view(self.count, self.longest, *values.shape[1:]).transpose(1, 2)


class Buckets:
    """Sequences, each some tokens of a pass, sorted into buckets."""

    def __init__(self, sequences: Sequence[Tensor], num_tokens: int, device: torch.device) -> None:
        """Plan the calls.

        Args:
            sequences: [length] int64 each, at least one token. Every token of the pass is in one of them or in several.
            num_tokens: Of the pass.
            device: Where it runs.
        """
        order = sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i))
        grouped: list[list[Tensor]] = []
        for sequence in (sequences[i] for i in order):
            if grouped and len(sequence) >= BUCKET_FILL * len(grouped[-1][0]):
                grouped[-1].append(sequence)
            else:
                grouped.append([sequence])
        self._buckets: list[Bucket] = []
        place = torch.empty(num_tokens, dtype=torch.int64)
        offset = 0
        for group in grouped:
            lengths = torch.tensor([len(sequence) for sequence in group])[:, None]
            ends = lengths.cumsum(0)
            step = torch.arange(len(group[0]))[None, :]
            tokens = torch.cat(group)[torch.minimum(ends - lengths + step, ends - 1)].flatten()
            is_real = (step < lengths).flatten()
            place[tokens[is_real]] = offset + is_real.nonzero().squeeze(1)
            padding = (~is_real).nonzero().squeeze(1)
            self._buckets.append(Bucket(len(group), len(group[0]), tokens.to(device), padding.to(device)))
            offset += len(tokens)
        self._place = place.to(device)

    def __iter__(self) -> Iterator[Bucket]:
        """The longest sequences first."""
        return iter(self._buckets)

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """What came out for each token; of a token in several sequences, what came out in one of them.

        Args:
            outputs: Of each bucket, [count, heads, longest, ...].

        Returns:
            [T, heads, ...].
        """
        flat = [output.transpose(1, 2).flatten(0, 1) for output in outputs]
        return (torch.cat(flat) if len(flat) > 1 else flat[0]).index_select(0, self._place)


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
        self._buckets = Buckets(torch.split(torch.arange(sum(lengths)), list(lengths)), sum(lengths), device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:  # noqa: ARG002
        """See `Attention`."""
        return attend_in_buckets(self._buckets, query, key, value, scale)


def attend_in_buckets(buckets: Buckets, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention within sequences. Padding lies behind the real tokens, which never look at it.

    Args:
        buckets: The sequences; a token in several of them attends to the same tokens in each.
        query: [T, query_heads, head_dim].
        key: [T, kv_heads, head_dim].
        value: [T, kv_heads, head_dim].
        scale: Of the dot products.

    Returns:
        [T, query_heads, head_dim].
    """
    is_grouped = query.shape[1] != key.shape[1]
    outputs: list[Tensor] = []
    for bucket in buckets:
        q, k, v = (bucket.take(values) for values in (query, key, value))
        outputs.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped))
    return buckets.join(outputs)
