"""Attention of decoding passes, with one new token for each response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.models.attention.form import AttentionForm, as_scores, seen_keys
from leaderless.models.attention.packed import Attention, PackedAttention, attend_padded
from leaderless.models.attention.recurrence import LayerStates, Mixer
from leaderless.models.attention.shared_prompts import Family, PrefixAttention
from leaderless.models.attention.some_keys import attend_some, bounded, flash_on_cpu
from leaderless.models.scoring import bmm_in_float32
from leaderless.models.uploads import placed
from leaderless.planner.memory.attention_kinds import AttentionKind
from leaderless.rollout.native.kv_cache import KeyValueStore, Segment, SegmentStore, Slots, StateBatches


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

    def seen_from(self, first: Tensor) -> _Seen:
        """The keys of each segment from a place on, [count, queries] int64, which may be behind its end."""
        first, ends = first.unsqueeze(2), torch.tensor(self.lengths)[:, None, None]
        is_blind, places = first >= ends, torch.arange(self.longest)
        mask = as_scores((places < ends) & ((places >= first) | is_blind))
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

    def seen_from(self, first: Tensor | None) -> list[_Seen]:
        """What each row of the pass sees of its prompt, from a place on, [n] int64, or all of it."""
        if first is None:
            return [tier.seen for tier in self.tiers]
        return [tier.seen_from(first[rows]) for tier, rows in zip(self.tiers, self._readers, strict=True)]

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

    def _seen_by(self, kind: AttentionKind) -> tuple[list[_Seen], list[_Seen]]:
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
                own = [tier.seen_from(part) for tier, part in zip(self._tiers, of_own, strict=True)]
            self._seen[kind] = own, shared.seen_from(first) if shared else []
        return self._seen[kind]

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Read the new token of each row after the states of its segment."""
        prompts = self.shared.prompts if self.shared else [None] * len(hidden)
        return self._store.recur(self._batches, layer, mixer, hidden, prompts)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Write the new token of each row, and attend tier by tier, then to shared prompts."""
        counts, (own, of_prompts) = [tier.count for tier in self._tiers], self._seen_by(form.kind)
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


QUERY_BLOCK = 1024
"""Most queries of a later part that attend at a time, so that masks stay small."""
KEY_BLOCK = 1 << 16
"""Most keys of all segments that later parts attend to at a time; some kernels copy them for each query head."""


@dataclass(frozen=True)
class PromptPart:
    """The `count` tokens of a text that one pass reads, after `begin` tokens that were read earlier.

    Those of a response come after all of a prompt that it shares, which has a segment to itself. Of a text that begins
    with this part, the first `num_both` tokens attend to one another in both directions.
    """

    segment: Segment
    begin: int
    count: int
    prompt: Segment | None = None
    num_both: int = 0

    @property
    def position(self) -> int:
        """Position of the first of the tokens; 0 if the part begins a text."""
        return self.begin + (self.prompt.length if self.prompt else 0)


class PrefillAttention:
    """Causal attention over prompts, which writes keys and values into their segments."""

    def __init__(self, parts: Sequence[PromptPart], device: torch.device) -> None:
        """Plan a pass over parts of different texts: first the parts that begin a text, then the later ones.

        What the device needs to know of it is `placed` there.
        """
        self._parts, counts = parts, [part.count for part in parts]
        tokens = torch.split(torch.arange(sum(counts)), counts)
        self._writes: list[tuple[KeyValueStore, Tensor, Tensor]] = []
        for home in dict.fromkeys(part.segment.home for part in parts):
            mine = [(own, part) for own, part in zip(tokens, parts, strict=True) if part.segment.home is home]
            source = torch.cat([own for own, _ in mine])
            places = torch.cat([home.places(part.segment, part.begin, part.count) for _, part in mine])
            self._writes.append((home, placed(source, device), placed(places, device)))
        first = [part for part in parts if not part.position]
        self._num_first, self._first = sum(part.count for part in first), _first_attention(first, device)
        later = [_Block(part, int(own[0])) for own, part in zip(tokens, parts, strict=True) if part.position]
        after = [piece for block in later if block.part.prompt is not None for piece in _split(block)]
        self._later: list[_LaterBlocks | _AfterPrompt] = [
            _LaterBlocks(group, device) for group in _grouped([x for x in later if x.part.prompt is None])
        ]
        self._later += [_AfterPrompt(block, device) for block in after]

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
        for home, source, places in self._writes:
            home.write(layer, places, key.index_select(0, source), value.index_select(0, source))
        results: list[Tensor] = []
        if self._first is not None:
            end = self._num_first
            results.append(self._first.attend(layer, query[:end], key[:end], value[:end], form))
        if self._later:
            later = torch.empty_like(query)
            for blocks in self._later:
                blocks.attend(layer, query, later, form)
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


class _Block(NamedTuple):
    """Tokens of a later part, of which the first is in row `row` of the pass."""

    part: PromptPart
    row: int

    @property
    def end(self) -> int:
        """Number of keys to which the last token attends."""
        return self.part.begin + self.part.count


def _grouped(later: Sequence[_Block]) -> Iterator[list[_Block]]:
    """Group what attends in one call: short parts in slots of one size, at least half as long as the longest of them.

    The blocks of a longer part attend one after the other.
    """
    for home in dict.fromkeys(block.part.segment.home for block in later):
        group: list[_Block] = []
        for block in sorted((b for b in later if b.part.segment.home is home), key=lambda b: -b.part.count):
            if block.part.count > QUERY_BLOCK:
                yield from ([piece] for piece in _split(block))
                continue
            keys = max(one.end for one in (*group, block)) * (len(group) + 1)
            if group and (2 * block.part.count < group[0].part.count or keys > KEY_BLOCK):
                yield group
                group = []
            group.append(block)
        if group:
            yield group


def _split(block: _Block) -> Iterator[_Block]:
    begin, count = block.part.begin, block.part.count
    for offset in range(0, count, QUERY_BLOCK):
        part = replace(block.part, begin=begin + offset, count=min(QUERY_BLOCK, count - offset))
        yield _Block(part, block.row + offset)


class _LaterBlocks:
    """Blocks that attend in one call to all that their segments have; they are padded to the longest block."""

    def __init__(self, blocks: Sequence[_Block], device: torch.device) -> None:
        parts = [block.part for block in blocks]
        self._longest = max(block.end for block in blocks)
        self._read = parts[0].segment.home.reader([part.segment for part in parts], self._longest, device)
        counts, begins, rows = (
            torch.tensor(numbers)[:, None]
            for numbers in ([p.count for p in parts], [p.begin for p in parts], [block.row for block in blocks])
        )
        steps = torch.arange(parts[0].count)[None, :]
        # Padding repeats the last token of a block.
        self._queries = placed(rows + torch.minimum(steps, counts - 1), device)
        self._positions = placed(begins + steps, device)
        self._seen: dict[AttentionKind, Tensor] = {}
        is_real = (steps < counts).flatten()
        self._real = None if bool(is_real.all()) else placed(is_real.nonzero().squeeze(1), device)

    def attend(self, layer: int, query: Tensor, output: Tensor, form: AttentionForm) -> None:
        """Attend with rows of [T, query_heads, head_dim] queries, and write the results into these rows."""
        rows = self._queries.flatten()
        block = query.index_select(0, rows).view(*self._queries.shape, *query.shape[1:]).transpose(1, 2)
        keys, values = (tensor.transpose(0, 1) for tensor in self._read(layer))
        is_seen = self._seen.get(form.kind)
        if is_seen is None:
            keys_at = torch.arange(self._longest, device=query.device)
            is_seen = self._seen[form.kind] = seen_keys(form.kind, self._positions, keys_at).unsqueeze(1)
        result = attend_seen(block, keys, values, is_seen, form).transpose(1, 2).flatten(0, 1)
        if self._real is not None:
            rows, result = rows.index_select(0, self._real), result.index_select(0, self._real)
        output.index_copy_(0, rows, result)


class _AfterPrompt:
    """A block of a response, which attends to a prompt that it shares and to its own segment."""

    def __init__(self, block: _Block, device: torch.device) -> None:
        part = block.part
        assert part.prompt is not None
        self._rows = slice(block.row, block.row + part.count)
        both = (part.prompt, part.prompt.length), (part.segment, block.end)
        self._parts = [segment.home.reader([segment], length, device) for segment, length in both]
        self._positions = placed(torch.arange(part.position + part.count), device)
        self._seen: dict[AttentionKind, Tensor] = {}

    def attend(self, layer: int, query: Tensor, output: Tensor, form: AttentionForm) -> None:
        """Attend with the rows of the block, and write them into the output."""
        both = zip(*(read(layer) for read in self._parts), strict=True)
        keys, values = (torch.cat([own[:, 0] for own in tensors], 1)[None] for tensors in both)
        block = query[self._rows].transpose(0, 1)[None]
        is_seen = self._seen.get(form.kind)
        if is_seen is None:
            own = self._positions[-block.shape[2] :]
            is_seen = self._seen[form.kind] = seen_keys(form.kind, own, self._positions)[None, None]
        output[self._rows] = attend_seen(block, keys, values, is_seen, form)[0].transpose(0, 1)


def attend_seen(query: Tensor, key: Tensor, value: Tensor, is_seen: Tensor, form: AttentionForm) -> Tensor:
    """Attend with heads in front, [n, heads, tokens, head_dim], to keys that are seen, [n, 1, queries, keys]."""
    if form.kind.softcap is None and form.sinks is None:
        return attend_padded(query, key, value, is_seen, form.scale)
    output, normalizer = attend_some(form, query, key, value, mask=as_scores(is_seen))
    return form.added_sink(output.transpose(1, 2), normalizer.transpose(1, 2))[0].transpose(1, 2)
