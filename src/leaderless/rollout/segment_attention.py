"""Attention of decoding passes, with one new token for each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leaderless.models.cpu_attention import flash_on_cpu
from leaderless.models.products import bmm_in_float32
from leaderless.rollout.kv_cache import Segment, SegmentStore, Slots


@dataclass(frozen=True)
class _Tier:
    """Segments in slots of one size, which are attended to in one call.

    `indices` are [count] int64 places where the new tokens of responses are written, or [count * width] int64 rows that
    attend to each prompt.
    """

    slots: Slots
    count: int  # of slots from the first on
    longest: int
    indices: Tensor
    mask: Tensor | None  # [1, count, 1, longest], minus infinity past a segment's end; None if all are equally long

    def attend(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend to each segment with queries, [count, queries, query_heads, head_dim].

        Returns:
            [count * queries, query_heads, head_dim] results, and [count * queries, query_heads] normalizers: logarithms
            of the sums by which the softmax divides.
        """
        keys, values = (tensor[:, : self.count, : self.longest] for tensor in self.slots.layer(layer))
        count, queries, heads, width = query.shape
        # Query heads that share a key head are computed as several queries of that head.
        kv_heads, repeat = len(keys), heads // len(keys)
        together = query.reshape(count, queries, kv_heads, repeat, width).permute(2, 0, 1, 3, 4).flatten(2, 3)
        if query.device.type == "cpu":
            mask = None if self.mask is None else self.mask.to(query.dtype)
            output, normalizer = flash_on_cpu(together, keys, values, attn_mask=mask, scale=scale)
        else:
            output, normalizer = attend_in_float32(together, keys, values, self.mask, scale)
        output = output.reshape(kv_heads, count, queries, repeat, width).permute(1, 2, 0, 3, 4)
        normalizer = normalizer.reshape(kv_heads, count, queries, repeat).permute(1, 2, 0, 3)
        return output.reshape(-1, heads, width), normalizer.reshape(-1, heads)


def attend_in_float32(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with scores in at least float32, as fused kernels do.

    Some models have biases of keys that make scores large. Rounded to bfloat16, these scores would be off by more than
    the differences between tokens. Queries, keys and values are [heads, n, tokens, head_dim]; a mask, [1, n, 1, keys],
    is added to the scores.

    Returns:
        [heads, n, queries, head_dim] results, and [heads, n, queries] normalizers.
    """
    scores = bmm_in_float32(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)) * scale
    scores = scores.view(*query.shape[:3], -1)
    scores = scores if mask is None else scores + mask
    normalizer = scores.logsumexp(dim=-1)
    return (scores - normalizer.unsqueeze(-1)).exp().to(value.dtype) @ value, normalizer


def _plan(slots: Slots, lengths: Sequence[int], indices: Tensor, device: torch.device) -> _Tier:
    """Plan the call for segments of some lengths."""
    longest, mask = max(lengths), None
    if min(lengths) < longest:
        ends = torch.tensor(lengths, device=device)
        is_past_end = torch.arange(longest, device=device)[None, :] >= ends[:, None]
        mask = torch.zeros(is_past_end.shape, device=device).masked_fill_(is_past_end, -torch.inf)[None, :, None, :]
    return _Tier(slots, len(lengths), longest, indices.to(device), mask)


class SharedPrompts:
    """Attention of responses to prompts that they share with siblings."""

    def __init__(self, store: SegmentStore, prompts: Sequence[Segment | None], device: torch.device) -> None:
        """Plan the calls, which stay the same until responses come or go.

        Each row of the pass has a prompt in the store, or None if the prompt is in the row's own segment.
        """
        readers: dict[Segment, list[int]] = {}
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                readers.setdefault(prompt, []).append(row)
        self.tiers: list[_Tier] = []
        self.place, offset = torch.zeros(len(prompts), dtype=torch.int64), 0
        for slots in store:
            groups = [readers.get(segment, []) for segment in slots.segments]
            width = max(1, *map(len, groups))
            rows = torch.zeros(len(groups), width, dtype=torch.int64)
            for number, group in enumerate(groups):
                rows[number, : len(group)] = torch.tensor(group, dtype=torch.int64)
                self.place[group] = offset + number * width + torch.arange(len(group))
            self.tiers.append(_plan(slots, [one.length for one in slots.segments], rows.flatten(), device))
            offset += rows.numel()
        # Until a response ends, it lies next to its siblings, and no row has to be moved.
        is_full = len(self.tiers) == 1 and offset == len(prompts)
        self.is_in_order = is_full and torch.equal(self.place, torch.arange(len(prompts)))
        self.place = self.place.to(device)
        is_read = torch.tensor([prompt is not None for prompt in prompts])
        self.is_read = None if bool(is_read.all()) else is_read.float()[:, None].to(device)

    def merge(self, layer: int, query: Tensor, output: Tensor, normalizer: Tensor, scale: float) -> Tensor:
        """Combine attention to own tokens with attention to prompts, each weighted by its share of the exponentials.

        Queries and outputs are [n, query_heads, head_dim], normalizers [n, query_heads].
        """
        results: list[tuple[Tensor, Tensor]] = []
        for tier in self.tiers:
            readers = query if self.is_in_order else query.index_select(0, tier.indices)
            results.append(tier.attend(layer, readers.reshape(tier.count, -1, *query.shape[1:]), scale))
        other, other_normalizer = _joined(results)
        if not self.is_in_order:
            other, other_normalizer = (t.index_select(0, self.place) for t in (other, other_normalizer))
        share = (other_normalizer - normalizer).sigmoid_().unsqueeze(2)
        if self.is_read is not None:
            share *= self.is_read.unsqueeze(2)
        return output.to(share.dtype).lerp(other.to(share.dtype), share).to(output.dtype)


def _joined(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(results) == 1:
        return results[0]
    outputs, normalizers = zip(*results, strict=True)
    return torch.cat(outputs), torch.cat(normalizers)


class DecodeAttention:
    """Attention of one new token per response to its prompt and to all earlier tokens of the response.

    The rows of the pass are the segments of the responses, in the order of their sizes and slots.
    """

    def __init__(self, store: SegmentStore, shared: SharedPrompts | None, longest: int, device: torch.device) -> None:
        """Prepare a pass over a store with room for one more token in each segment.

        `longest` counts the tokens of the longest sequence with its prompt; `shared` are prompts outside of the store.
        """
        self.shared, self.longest = shared, longest
        self._tiers: list[_Tier] = []
        for slots in store:
            lengths = [segment.length for segment in slots.segments]
            places = [slot * slots.capacity + length for slot, length in enumerate(lengths)]
            self._tiers.append(_plan(slots, [length + 1 for length in lengths], torch.tensor(places), device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attention`."""
        counts = [tier.count for tier in self._tiers]
        results: list[tuple[Tensor, Tensor]] = []
        for tier, q, k, v in zip(
            self._tiers, *(torch.split(tensor, counts) for tensor in (query, key, value)), strict=True
        ):
            tier.slots.write(layer, tier.indices, k, v)
            results.append(tier.attend(layer, q.unsqueeze(1), scale))
        output, normalizer = _joined(results)
        return output if self.shared is None else self.shared.merge(layer, query, output, normalizer, scale)
