"""Attention of parts of texts that continue what earlier passes have read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from leaderless.models.attention.form import AttentionForm, as_scores, seen_keys
from leaderless.models.attention.packed import attend_padded
from leaderless.models.attention.some_keys import attend_some
from leaderless.models.uploads import placed
from leaderless.planner.memory.attention_kinds import FULL, AttentionKind
from leaderless.rollout.native.kv_cache import PromptPart, Segment, Slots, tokens_at

QUERY_BLOCK = 1024
"""Most queries of a later part that attend at a time, so that masks stay small."""
KEY_BLOCK = 1 << 16
"""Most keys of all segments that later parts attend to at a time; some kernels copy them for each query head."""


class Block(NamedTuple):
    """Tokens of a later part, of which the first is in row `row` of the pass."""

    part: PromptPart
    row: int

    @property
    def end(self) -> int:
        """Number of keys to which the last token attends."""
        return self.part.begin + self.part.count


def _grouped(later: Sequence[Block]) -> Iterator[list[Block]]:
    """Group what attends in one call: short parts in slots of one size, at least half as long as the longest of them.

    The blocks of a longer part attend one after the other.
    """
    for home in dict.fromkeys(block.part.segment.home for block in later):
        group: list[Block] = []
        for block in sorted((b for b in later if b.part.segment.home is home), key=lambda b: -b.part.count):
            if block.part.count > QUERY_BLOCK:
                yield from ([piece] for piece in split(block))
                continue
            keys = max(one.end for one in (*group, block)) * (len(group) + 1)
            if group and (2 * block.part.count < group[0].part.count or keys > KEY_BLOCK):
                yield group
                group = []
            group.append(block)
        if group:
            yield group


def split(block: Block) -> Iterator[Block]:
    """Divide a block into blocks of at most `QUERY_BLOCK` queries."""
    begin, count = block.part.begin, block.part.count
    for offset in range(0, count, QUERY_BLOCK):
        part = replace(block.part, begin=begin + offset, count=min(QUERY_BLOCK, count - offset))
        yield Block(part, block.row + offset)


class LaterBlocks:
    """Blocks that attend in one call to all tokens before them; they are padded to the longest block."""

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
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
        self._is_seen = placed(seen_keys(FULL, begins + steps, torch.arange(self._longest)), device).unsqueeze(1)
        is_real = (steps < counts).flatten()
        self._real = None if bool(is_real.all()) else placed(is_real.nonzero().squeeze(1), device)

    def attend(self, layer: int, query: Tensor, output: Tensor, form: AttentionForm) -> None:
        """Attend with rows of [T, query_heads, head_dim] queries, and write the results into these rows."""
        rows = self._queries.flatten()
        block = query.index_select(0, rows).view(*self._queries.shape, *query.shape[1:]).transpose(1, 2)
        keys, values = (tensor.transpose(0, 1) for tensor in self._read(layer))
        result = attend_seen(block, keys, values, self._is_seen, form).transpose(1, 2).flatten(0, 1)
        if self._real is not None:
            rows, result = rows.index_select(0, self._real), result.index_select(0, self._real)
        output.index_copy_(0, rows, result)


class AfterPrompt:
    """A block of a response, which attends to all of a prompt that it shares and to its own segment."""

    def __init__(self, block: Block, device: torch.device) -> None:
        part = block.part
        assert part.prompt is not None
        self._rows = slice(block.row, block.row + part.count)
        both = (part.prompt, part.prompt.length), (part.segment, block.end)
        self._parts = [segment.home.reader([segment], length, device) for segment, length in both]
        positions = torch.arange(part.position + part.count)
        self._is_seen = placed(seen_keys(FULL, positions[part.position :], positions), device)[None, None]

    def attend(self, layer: int, query: Tensor, output: Tensor, form: AttentionForm) -> None:
        """Attend with the rows of the block, and write them into the output."""
        both = zip(*(read(layer) for read in self._parts), strict=True)
        keys, values = (torch.cat([own[:, 0] for own in tensors], 1)[None] for tensors in both)
        block = query[self._rows].transpose(0, 1)[None]
        output[self._rows] = attend_seen(block, keys, values, self._is_seen, form)[0].transpose(0, 1)


def calls_of(later: Sequence[Block], device: torch.device) -> list[LaterBlocks | AfterPrompt]:
    """The calls in which blocks attend to all tokens before them."""
    alone = _grouped([block for block in later if block.part.prompt is None])
    after = [piece for block in later if block.part.prompt is not None for piece in split(block)]
    return [*(LaterBlocks(group, device) for group in alone), *(AfterPrompt(block, device) for block in after)]


class _Before(NamedTuple):
    """Tokens of a segment to which a block may attend: some that were read earlier, and others in the same pass.

    Attributes:
        segment: The segment.
        position: Position of its first token.
        num_known: Tokens that were read earlier.
        rows: Rows of the next ones in the pass, the block's own included.
    """

    segment: Segment
    position: int
    num_known: int
    rows: range


class _Known(NamedTuple):
    """Keys and values that a block needs of earlier passes, [kv_heads, n, head_dim], with their [n] int64 positions."""

    keys: Tensor
    values: Tensor
    positions: Tensor


class InWindow:
    """A block that continues a text, in layers where a later token takes the place of an earlier one."""

    def __init__(self, block: Block, read: Mapping[Segment, Block], device: torch.device) -> None:
        """Describe what is before a block, of which a pass may have `read` some."""
        part, self._rows, self._device = block.part, slice(block.row, block.row + block.part.count), device
        self._first, self._sources = part.position, list[_Before]()
        prompt = [] if part.prompt is None else [(part.prompt, 0, part.prompt.length)]
        for segment, position, end in (*prompt, (part.segment, part.position - part.begin, block.end)):
            own = read.get(segment)
            num_known, row = (end, 0) if own is None else (own.part.begin, own.row)
            self._sources.append(_Before(segment, position, num_known, range(row, row + end - num_known)))
        self._seen: dict[AttentionKind, Tensor] = {}

    def known(self, layer: int, kind: AttentionKind) -> list[_Known]:
        """Copy what the block needs of earlier passes, before this one writes."""
        first, found = kind.first_key(self._first), list[_Known]()
        for segment, position, num_known, _ in self._sources:
            if position + num_known <= first:
                continue
            assert isinstance(segment.home, Slots)
            kept = segment.home.num_kept(layer)
            places = torch.arange(min(num_known, kept))
            keys, values = (one[:, segment.slot, : len(places)].clone() for one in segment.home.layer(layer))
            found.append(_Known(keys, values, position + tokens_at(places, torch.tensor(num_known), kept)))
        return found

    def attend(
        self, inputs: tuple[Tensor, Tensor, Tensor], known: Sequence[_Known], output: Tensor, form: AttentionForm
    ) -> None:
        """Attend with the rows of the block to what is known and to rows of the pass, and write them into the output.

        Queries, keys and values of the pass are [T, heads, head_dim].
        """
        query, key, value = inputs
        first, rows, positions = form.kind.first_key(self._first), list[slice](), [one.positions for one in known]
        for _, position, num_known, there in self._sources:
            seen = there[max(0, first - position - num_known) :]
            rows.append(slice(seen.start, seen.stop))
            positions.append(position + num_known + torch.tensor(seen, dtype=torch.int64) - there.start)
        if form.kind not in self._seen:
            own = self._first + torch.arange(self._rows.stop - self._rows.start)
            self._seen[form.kind] = placed(seen_keys(form.kind, own, torch.cat(positions)), self._device)[None, None]
        keys, values = (
            torch.cat([*earlier, *(tensor[some].transpose(0, 1) for some in rows)], 1)[None]
            for earlier, tensor in (([one.keys for one in known], key), ([one.values for one in known], value))
        )
        block = query[self._rows].transpose(0, 1)[None]
        output[self._rows] = attend_seen(block, keys, values, self._seen[form.kind], form)[0].transpose(0, 1)


def attend_seen(query: Tensor, key: Tensor, value: Tensor, is_seen: Tensor, form: AttentionForm) -> Tensor:
    """Attend with heads in front, [n, heads, tokens, head_dim], to keys that are seen, [n, 1, queries, keys]."""
    if form.kind.softcap is None and form.sinks is None:
        return attend_padded(query, key, value, is_seen, form.scale)
    output, normalizer = attend_some(form, query, key, value, mask=as_scores(is_seen))
    return form.added_sink(output.transpose(1, 2), normalizer.transpose(1, 2))[0].transpose(1, 2)
