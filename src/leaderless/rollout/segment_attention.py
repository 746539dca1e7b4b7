"""Attention of decoding passes, with one new token for each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.models.cpu_attention import flash_on_cpu
from leaderless.models.products import bmm_in_float32
from leaderless.rollout.kv_cache import Segment, SegmentStore, Slots


class Rounding(NamedTuple):
    """Multiples to which sizes are rounded up, so that passes of the same shapes recur.

    `rows` is for numbers of responses and prompts, and above 1 numbers of siblings become powers of two; `tokens` is
    for the length of the longest segment.
    """

    rows: int
    tokens: int


def round_up(value: int, multiple: int) -> int:
    """Round up to the next multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class _Tier:
    """Segments in slots of one size, which are attended to in one call.

    `indices` are [count] int64 places where the new tokens of responses are written, or [count * width] int64 rows that
    attend to each prompt.
    """

    slots: Slots
    count: int  # of slots from the first on; the last ones may be empty, and their results are not used
    longest: int
    indices: Tensor
    mask: Tensor | None  # [1, count, 1, longest], minus infinity past a segment's end; None if all are equally long

    def signature(self) -> tuple[int, ...]:
        sizes = (self.slots.capacity, self.slots.allocation, self.count, self.longest, len(self.indices))
        return (*sizes, self.mask is None)

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


def _plan(slots: Slots, lengths: Sequence[int], indices: Tensor, rounding: Rounding, device: torch.device) -> _Tier:
    """Plan the call for segments of some lengths; an empty one counts as a token, whose result is not used."""
    longest, mask = min(round_up(max(lengths), rounding.tokens), slots.capacity), None
    if rounding.rows > 1 or min(lengths) < longest:
        ends = torch.tensor(lengths, device=device).clamp(min=1)
        is_past_end = torch.arange(longest, device=device)[None, :] >= ends[:, None]
        mask = torch.zeros(is_past_end.shape, device=device).masked_fill_(is_past_end, -torch.inf)[None, :, None, :]
    return _Tier(slots, len(lengths), longest, indices.to(device), mask)


class SharedPrompts:
    """Attention of responses to prompts that they share with siblings."""

    def __init__(
        self, store: SegmentStore, prompts: Sequence[Segment | None], rounding: Rounding, device: torch.device
    ) -> None:
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
            count, width = round_up(len(groups), rounding.rows), max(1, *map(len, groups))
            width = width if rounding.rows == 1 else 1 << (width - 1).bit_length()
            rows = torch.zeros(count, width, dtype=torch.int64)
            for number, group in enumerate(groups):
                rows[number, : len(group)] = torch.tensor(group, dtype=torch.int64)
                self.place[group] = offset + number * width + torch.arange(len(group))
            lengths = [segment.length for segment in slots.segments] + [0] * (count - len(groups))
            self.tiers.append(_plan(slots, lengths, rows.flatten(), rounding, device))
            offset += count * width
        in_order = torch.arange(len(prompts))
        # Until a response ends, it lies next to its siblings, and no row has to be moved.
        self.is_in_order = (
            rounding.rows == 1
            and len(self.tiers) == 1
            and torch.equal(self.place, in_order)
            and torch.equal(self.tiers[0].indices.cpu(), in_order)
        )
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

    def __init__(
        self, store: SegmentStore, shared: SharedPrompts | None, longest: int, rounding: Rounding, device: torch.device
    ) -> None:
        """Prepare a pass over a store with room for one more token in each segment.

        `longest` counts the tokens of the longest sequence with its prompt; `shared` are prompts outside of the store.
        """
        self.shared, self.longest = shared, longest
        self._tiers: list[_Tier] = []
        for slots in store:
            lengths = [segment.length for segment in slots.segments]
            count = round_up(len(lengths), rounding.rows)
            places = [slot * slots.capacity + length for slot, length in enumerate(lengths)]
            places += [slots.unused_place(slot) for slot in range(len(lengths), count)]
            ends = [length + 1 for length in lengths] + [1] * (count - len(lengths))
            self._tiers.append(_plan(slots, ends, torch.tensor(places), rounding, device))

    @property
    def _all_tiers(self) -> list[_Tier]:
        return self._tiers if self.shared is None else [*self._tiers, *self.shared.tiers]

    def signature(self) -> tuple[int, ...]:
        """List everything that a recorded pass depends on besides the values of its tensors."""
        shared = () if self.shared is None else (self.shared.is_read is None, self.shared.is_in_order)
        return (len(self._tiers), *shared, *(number for tier in self._all_tiers for number in tier.signature()))

    def allocations(self) -> frozenset[int]:
        """List the memory of keys and values that a recorded pass continues to read and write."""
        return frozenset(tier.slots.allocation for tier in self._all_tiers)

    def tensors(self) -> list[Tensor]:
        """List the tensors that are copied into a recorded pass."""
        shared = () if self.shared is None else (self.shared.place, self.shared.is_read)
        tiers = (tensor for tier in self._all_tiers for tensor in (tier.indices, tier.mask))
        return [tensor for tensor in (*shared, *tiers) if tensor is not None]

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
