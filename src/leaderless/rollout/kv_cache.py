"""Keys and values of the sequences that are being decoded, and attention that reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from leaderless.models.attention import PackedAttention

LayerKeysValues = tuple[Tensor, Tensor]


class PrefillAttention(PackedAttention):
    """Causal attention over whole prompts that keeps their keys and values."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        super().__init__(lengths, device)
        self.lengths = list(lengths)
        self._layers: dict[int, LayerKeysValues] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attention`."""
        self._layers[layer] = (key, value)
        return super().attend(layer, query, key, value, scale)

    def prompts(self) -> list[list[LayerKeysValues]]:
        """For each prompt the keys and values of all layers, [length, kv_heads, head_dim] each."""
        split = [
            tuple(torch.split(tensor, self.lengths) for tensor in self._layers[layer]) for layer in sorted(self._layers)
        ]
        return [[(keys[i], values[i]) for keys, values in split] for i in range(len(self.lengths))]


@dataclass
class _Layer:
    keys: Tensor
    values: Tensor


class SlotCache:
    """One slot of fixed length for each sequence; the sequences that are active fill the first slots."""

    def __init__(self, num_slots: int) -> None:
        """Describe the cache; memory is taken when the first prompt comes, and its shapes are known.

        Args:
            num_slots: Most sequences at the same time.
        """
        self.num_slots = num_slots
        self.layers: list[_Layer] = []

    def fill(self, slot: int, prompt: Sequence[LayerKeysValues], max_tokens: int) -> None:
        """Begin a sequence with the keys and values of its prompt.

        Args:
            slot: A free one.
            prompt: By layer, [length, kv_heads, head_dim] each.
            max_tokens: Longest that the sequence may become.
        """
        if not self.layers:
            self.layers = [_Layer(keys.new_empty(0), values.new_empty(0)) for keys, values in prompt]
        for layer, (keys, values) in zip(self.layers, prompt, strict=True):
            layer.keys = self._grown(layer.keys, keys, slot, max_tokens)
            layer.values = self._grown(layer.values, values, slot, max_tokens)
            layer.keys[slot, :, : len(keys)] = keys.transpose(0, 1)
            layer.values[slot, :, : len(values)] = values.transpose(0, 1)

    def _grown(self, held: Tensor, like: Tensor, slot: int, max_tokens: int) -> Tensor:
        """Room for a slot and a length, with what is there."""
        slots, length = (held.shape[0], held.shape[2]) if held.numel() else (0, 0)
        if slot < slots and max_tokens <= length:
            return held
        slots = min(max(slot + 1, 2 * slots), self.num_slots) if slot >= slots else slots
        room = like.new_zeros(slots, like.shape[1], max(max_tokens, length), like.shape[2])
        if held.numel():
            room[: held.shape[0], :, :length] = held
        return room

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence into another slot.

        Args:
            source: Where it is.
            target: A free slot.
            length: Its tokens.
        """
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]


class DecodeAttention:
    """Attention of one new token of each active sequence to all of its tokens so far."""

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        """Prepare one step.

        Args:
            cache: Holds the sequences.
            positions: [n] int64, place of the new token in its sequence; sequence i is in slot i.
        """
        self.cache, self.positions = cache, positions
        self.longest = int(positions.max()) + 1
        self._slots = torch.arange(len(positions), device=positions.device)
        steps = torch.arange(self.longest, device=positions.device)
        self._mask = (steps[None, :] <= positions[:, None])[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attention`. The query heads that share a key head are computed as its several queries."""
        stored = self.cache.layers[layer]
        stored.keys[self._slots, :, self.positions] = key
        stored.values[self._slots, :, self.positions] = value
        count, heads, width = query.shape
        queries = query.view(count, key.shape[1], heads // key.shape[1], width)
        output = scaled_dot_product_attention(
            queries,
            stored.keys[:count, :, : self.longest],
            stored.values[:count, :, : self.longest],
            attn_mask=self._mask,
            scale=scale,
        )
        return output.reshape(count, heads, width)
