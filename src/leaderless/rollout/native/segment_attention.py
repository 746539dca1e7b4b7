"""Attention of passes of the native engine: of decoding, with one new token for each response, and of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.models.attention.form import AttentionForm, as_scores
from leaderless.models.attention.packed import Attention, PackedAttention
from leaderless.models.attention.recurrence import LayerStates, Mixer
from leaderless.models.attention.shared_prompts import Family, PrefixAttention
from leaderless.models.attention.some_keys import bounded, flash_on_cpu
from leaderless.models.scoring import bmm_in_float32
from leaderless.models.uploads import placed
from leaderless.planner.memory.attention_kinds import AttentionKind
from leaderless.rollout.native.kv_cache import (
    KeyValueStore,
    PromptPart,
    Segment,
    SegmentStore,
    Slots,
    StateBatches,
    tokens_at,
)
from leaderless.rollout.native.later_parts import Block, InWindow, calls_of, split


class _Seen(NamedTuple):
    """Keys that queries of a tier attend to.

    Attributes:
        mask: [1, count, queries or 1, longest] float32, added to scores; None if all are seen.
        is_blind: [count, queries], queries that see no key, to which the mask shows all; None if there are none.
    """

    mask: Tensor | None = None
    is_blind: Tensor | None = None


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
    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def seen(self) -> _Seen:
        """All of each segment."""
        if min(self.lengths) == self.longest:
            return _Seen()
        ends = torch.tensor(self.lengths)[:, None, None]
        return _Seen(placed(as_scores(torch.arange(self.longest) < ends)[None], self.device))

    def seen_from(self, layer: int, first: Tensor) -> _Seen:
        """The keys of each segment from a token on, [count, queries] int64, which may be behind its end."""
        first, ends = first.unsqueeze(2), torch.tensor(self.lengths)[:, None, None]
        kept = self.slots.num_kept(layer)
        is_blind, tokens = first >= ends, tokens_at(torch.arange(min(self.longest, kept)), ends, kept)
        mask = as_scores((tokens >= 0) & ((tokens >= first) | is_blind))
        return _Seen(placed(mask[None], self.device), placed(is_blind.squeeze(2), self.device))

    def attend(self, layer: int, query: Tensor, form: AttentionForm, seen: _Seen) -> tuple[Tensor, Tensor]:
        """Attend to each segment with queries, [count, queries, query_heads, head_dim].

        Returns:
            [count * queries, query_heads, head_dim] results, and [count * queries, query_heads] normalizers: logarithms
            of the sums by which the softmax divides, minus infinity for a query that sees none of the keys.
        """
        keys, values = (tensor[:, : self.count, : self.longest] for tensor in self.slots.layer(layer))
        count, queries, heads, width = query.shape
        # Query heads that share a key head are computed as several queries of that head.
        kv_heads, repeat = len(keys), heads // len(keys)
        together = query.reshape(count, queries, kv_heads, repeat, width).permute(2, 0, 1, 3, 4).flatten(2, 3)
        mask = seen.mask
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat_interleave(repeat, dim=2)
        if query.device.type == "cpu" and form.kind.softcap is None:
            mask = None if mask is None else mask.to(query.dtype)
            output, normalizer = flash_on_cpu(together, keys, values, attn_mask=mask, scale=form.scale)
        else:
            output, normalizer = attend_in_float32(together, keys, values, mask, form)
        output = output.reshape(kv_heads, count, queries, repeat, width).permute(1, 2, 0, 3, 4)
        normalizer = normalizer.reshape(kv_heads, count, queries, repeat).permute(1, 2, 0, 3)
        if seen.is_blind is not None:
            normalizer = normalizer.masked_fill(seen.is_blind[:, :, None, None], -torch.inf)
        return output.reshape(-1, heads, width), normalizer.reshape(-1, heads)


def attend_in_float32(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, form: AttentionForm
) -> tuple[Tensor, Tensor]:
    """Attend with scores in at least float32, as fused kernels do.

    Some models have biases of keys that make scores large. Rounded to bfloat16, these scores would be off by more than
    the differences between tokens. Queries, keys and values are [heads, n, tokens, head_dim]; a mask, [1, n, queries or
    1, keys], is added to the scores. The sink of the form is left out.

    Returns:
        [heads, n, queries, head_dim] results, and [heads, n, queries] normalizers.
    """
    scores = bmm_in_float32(query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2)) * form.scale
    scores = scores if form.kind.softcap is None else bounded(scores, form.kind.softcap)
    scores = scores.view(*query.shape[:3], -1)
    scores = scores if mask is None else scores + mask
    normalizer = scores.logsumexp(dim=-1)
    return (scores - normalizer.unsqueeze(-1)).exp().to(value.dtype) @ value, normalizer


def _plan(slots: Slots, lengths: Sequence[int], indices: Tensor, device: torch.device) -> _Tier:
    """Plan the call for segments of some lengths."""
    return _Tier(slots, len(lengths), max(lengths), indices.to(device), lengths, device)


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
        self.prompts = prompts
        self.lengths = torch.tensor([0 if prompt is None else prompt.length for prompt in prompts])
        self.tiers: list[_Tier] = []
        self._readers: list[Tensor] = []
        self.place, offset = torch.zeros(len(prompts), dtype=torch.int64), 0
        for slots in store:
            groups = [readers.get(segment, []) for segment in slots.segments]
            width = max(1, *map(len, groups))
            rows = torch.zeros(len(groups), width, dtype=torch.int64)
            for number, group in enumerate(groups):
                rows[number, : len(group)] = torch.tensor(group, dtype=torch.int64)
                self.place[group] = offset + number * width + torch.arange(len(group))
            self.tiers.append(_plan(slots, [one.length for one in slots.segments], rows.flatten(), device))
            self._readers.append(rows)
            offset += rows.numel()
        # Until a response ends, it lies next to its siblings, and no row has to be moved.
        is_full = len(self.tiers) == 1 and offset == len(prompts)
        self.is_in_order = is_full and torch.equal(self.place, torch.arange(len(prompts)))
        self.place = self.place.to(device)
        is_read = torch.tensor([prompt is not None for prompt in prompts])
        self.is_read = None if bool(is_read.all()) else is_read.float()[:, None].to(device)

    def seen_from(self, layer: int, first: Tensor | None) -> list[_Seen]:
        """What each row of the pass sees of its prompt in a layer, from a token on, [n] int64, or all of it."""
        if first is None:
            return [tier.seen for tier in self.tiers]
        return [tier.seen_from(layer, first[rows]) for tier, rows in zip(self.tiers, self._readers, strict=True)]

    def merge(
        self,
        layer: int,
        query: Tensor,
        output: Tensor,
        normalizer: Tensor,
        form: AttentionForm,
        seen: Sequence[_Seen],
    ) -> Tensor:
        """Combine attention to own tokens with attention to prompts, each weighted by its share of the exponentials.

        Queries and outputs are [n, query_heads, head_dim], normalizers [n, query_heads].
        """
        results: list[tuple[Tensor, Tensor]] = []
        for tier, part in zip(self.tiers, seen, strict=True):
            readers = query if self.is_in_order else query.index_select(0, tier.indices)
            results.append(tier.attend(layer, readers.reshape(tier.count, -1, *query.shape[1:]), form, part))
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
        self, store: SegmentStore, shared: SharedPrompts | None, batches: StateBatches, device: torch.device
    ) -> None:
        """Prepare a pass over a store with room for one more token in each segment.

        `shared` are prompts outside of the store; batches of states are kept as long as the rows are the same.
        """
        self.shared, self._store, self._batches = shared, store, batches
        self._tiers: list[_Tier] = []
        own: list[int] = []
        for slots in store:
            lengths = [segment.length for segment in slots.segments]
            own += lengths
            places = [slot * slots.capacity + length for slot, length in enumerate(lengths)]
            self._tiers.append(_plan(slots, [length + 1 for length in lengths], torch.tensor(places), device))
        self._own_lengths = own
        self._seen: dict[AttentionKind, tuple[list[_Seen], list[_Seen]]] = {}

    def _seen_by(self, layer: int, kind: AttentionKind) -> tuple[list[_Seen], list[_Seen]]:
        """What new tokens see of their own segments, and of shared prompts; the same in all layers of a kind."""
        if kind not in self._seen:
            shared, first = self.shared, None
            if kind.sees_all:
                own = [tier.seen for tier in self._tiers]
            else:
                before = shared.lengths if shared else torch.zeros(len(self._own_lengths), dtype=torch.int64)
                positions = (before + torch.tensor(self._own_lengths)).tolist()
                first = torch.tensor([kind.first_key(position) for position in positions])
                of_own = torch.split((first - before).clamp(min=0)[:, None], [tier.count for tier in self._tiers])
                own = [tier.seen_from(layer, part) for tier, part in zip(self._tiers, of_own, strict=True)]
            self._seen[kind] = own, shared.seen_from(layer, first) if shared else []
        return self._seen[kind]

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Read the new token of each row after the states of its segment."""
        prompts = self.shared.prompts if self.shared else [None] * len(hidden)
        return self._store.recur(self._batches, layer, mixer, hidden, prompts)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the new token of each row, and attend tier by tier, then to shared prompts."""
        counts, (own, of_prompts) = [tier.count for tier in self._tiers], self._seen_by(layer, form.kind)
        results: list[tuple[Tensor, Tensor]] = []
        for tier, seen, q, k, v in zip(
            self._tiers, own, *(torch.split(tensor, counts) for tensor in (query, key, value)), strict=True
        ):
            tier.slots.write(layer, tier.indices, k, v)
            results.append(tier.attend(layer, q.unsqueeze(1), form, seen))
        output, normalizer = form.added_sink(*_joined(results))
        if self.shared is None:
            return output
        return self.shared.merge(layer, query, output, normalizer, form, of_prompts)


class _Writes(NamedTuple):
    """Rows of a pass, and their places in a store."""

    home: KeyValueStore
    rows: Tensor
    places: Tensor


class PrefillAttention:
    """Causal attention over prompts, which writes keys and values into their segments."""

    def __init__(self, parts: Sequence[PromptPart], device: torch.device) -> None:
        """Plan a pass over parts of different texts: first the parts that begin a text, then the later ones.

        What the device needs to know of it is `placed` there.
        """
        self._parts, self._device, counts = parts, device, [part.count for part in parts]
        tokens = torch.split(torch.arange(sum(counts)), counts)
        self._blocks = [Block(part, int(own[0])) for own, part in zip(tokens, parts, strict=True)]
        self._writes: dict[AttentionKind | None, list[_Writes]] = {None: self._writes_of(None)}
        first = [part for part in parts if not part.position]
        self._num_first, self._first = sum(part.count for part in first), _first_attention(first, device)
        later = [block for block in self._blocks if block.part.position]
        self._later = calls_of(later, device) if later else []

    @cached_property
    def _in_windows(self) -> list[InWindow]:
        read = {block.part.segment: block for block in self._blocks}
        later = [piece for block in self._blocks if block.part.position for piece in split(block)]
        return [InWindow(piece, read, self._device) for piece in later]

    def _writes_of(self, kind: AttentionKind | None) -> list[_Writes]:
        """Where keys and values are written: those of all tokens, or of those to which others of a kind may attend."""
        writes, most = list[_Writes](), None if kind is None else kind.window or kind.chunk
        for home in dict.fromkeys(part.segment.home for part in self._parts):
            mine = [block for block in self._blocks if block.part.segment.home is home]
            counts = [block.part.count if most is None else min(block.part.count, most) for block in mine]
            rows, places = list[Tensor](), list[Tensor]()
            for (part, row), count in zip(mine, counts, strict=True):
                before = part.count - count
                rows.append(torch.arange(row + before, row + part.count))
                places.append(home.places(part.segment, part.begin + before, count))
            writes.append(_Writes(home, *(placed(torch.cat(one), self._device) for one in (rows, places))))
        return writes

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Read each part after the states of its segment, or of the prompt before it, and keep the states behind it."""
        results: list[Tensor] = []
        for part, rows in zip(self._parts, torch.split(hidden, [part.count for part in self._parts]), strict=True):
            before = part.segment if part.begin else part.prompt
            states = LayerStates() if before is None else before.states[layer].copy()
            results.append(mixer(rows.unsqueeze(0), states).squeeze(0))
            part.segment.states[layer] = states.copy()  # else they would keep all inputs of a convolution
        return torch.cat(results)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write all keys and values, then attend: first the parts that begin a text, then the later ones."""
        window = None if form.kind.sees_all else form.kind
        if window not in self._writes:
            self._writes[window] = self._writes_of(window)
        known = [] if window is None else [block.known(layer, window) for block in self._in_windows]
        for home, source, places in self._writes[window]:
            home.write(layer, places, key.index_select(0, source), value.index_select(0, source))
        results: list[Tensor] = []
        if self._first is not None:
            end = self._num_first
            results.append(self._first.attend(layer, query[:end], key[:end], value[:end], form))
        if self._later:
            later = torch.empty_like(query)
            if window is None:
                for blocks in self._later:
                    blocks.attend(layer, query, later, form)
            for block, before in zip(self._in_windows if window else [], known, strict=True):
                block.attend((query, key, value), before, later, form)
            results.append(later[self._num_first :])
        return results[0] if len(results) == 1 else torch.cat(results)


def _first_attention(parts: Sequence[PromptPart], device: torch.device) -> Attention | None:
    """Attention of parts that begin a text, all of models of one kind."""
    if not parts:
        return None
    if not any(part.num_both for part in parts):
        return PackedAttention([part.count for part in parts], device)
    assert all(0 < part.num_both <= part.count for part in parts), "a prompt is read in one part"
    rest = [(part.num_both, part.count - part.num_both) for part in parts]
    return PrefixAttention([Family(both, (after,) if after else ()) for both, after in rest], device)
