"""Attention that reads and writes runs of tokens: of prompts that are read, and of one new token of each response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from leaderless.models.attention import PackedAttention
from leaderless.models.cpu_attention import flash_on_cpu
from leaderless.rollout.kv_cache import Run, RunStore, Slots

QUERY_BLOCK = 1024
"""Tokens of a long prompt's later pieces that attend at a time."""


@dataclass(frozen=True)
class Piece:
    """Tokens of a run that one pass reads.

    Attributes:
        run: Of a prompt.
        begin: Tokens of it that were read before.
        count: Tokens that are read now.
    """

    run: Run
    begin: int
    count: int


class PrefillAttention(PackedAttention):
    """Causal attention over prompts, whose keys and values go into their runs."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        """Plan a pass.

        Args:
            pieces: Whole prompts; or a later piece of one, alone.
            device: Where the pass runs.
        """
        super().__init__([piece.count for piece in pieces], device)
        self._late = pieces[0] if pieces[0].begin else None
        self.longest = max(piece.begin + piece.count for piece in pieces)
        counts = [piece.count for piece in pieces]
        tokens = torch.split(torch.arange(sum(counts)), counts)
        self._writes: list[tuple[Slots, Tensor, Tensor]] = []
        for home in dict.fromkeys(piece.run.home for piece in pieces):
            mine = [(own, piece) for own, piece in zip(tokens, pieces, strict=True) if piece.run.home is home]
            begins = [piece.run.slot * home.capacity + piece.begin - int(own[0]) for own, piece in mine]
            source = torch.cat([own for own, _ in mine])
            places = torch.cat([own + begin for (own, _), begin in zip(mine, begins, strict=True)])
            self._writes.append((home, source.to(device), places.to(device)))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attention`."""
        for home, source, places in self._writes:
            home.write(layer, places, key.index_select(0, source), value.index_select(0, source))
        if self._late is None:
            return super().attend(layer, query, key, value, scale)
        return self._attend_late(self._late, layer, query, scale)

    def _attend_late(self, piece: Piece, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attention to what was read before, too; in blocks, so that masks stay small."""
        outputs: list[Tensor] = []
        for begin in range(0, piece.count, QUERY_BLOCK):
            block = query[begin : begin + QUERY_BLOCK].transpose(0, 1).unsqueeze(0)
            longest = piece.begin + begin + block.shape[2]
            keys, values = (tensor[:, piece.run.slot, :longest].unsqueeze(0) for tensor in piece.run.home.layer(layer))
            is_seen = torch.ones(block.shape[2], longest, dtype=torch.bool, device=query.device)
            is_seen = is_seen.tril(longest - block.shape[2])
            output = scaled_dot_product_attention(
                block, keys, values, is_seen, scale=scale, enable_gqa=block.shape[1] != keys.shape[1]
            )
            outputs.append(output.squeeze(0).transpose(0, 1))
        return torch.cat(outputs)


class Rounding(NamedTuple):
    """To multiples of what numbers are rounded up, so that passes of the same shapes come again.

    Attributes:
        rows: Of responses, prompts, and siblings.
        tokens: Of the longest run.
    """

    rows: int
    tokens: int


def round_up(value: int, multiple: int) -> int:
    """The next multiple.

    Args:
        value: At least 0.
        multiple: At least 1.
    """
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class _Part:
    """Runs of one size that are attended to in one call.

    Attributes:
        slots: Where they are, from the first on.
        count: Of them; the last may be empty slots, which nobody looks at.
        longest: Tokens of the longest.
        indices: [count] int64, where the new token of each is written; of prompts [count * width] int64, which rows
            attend to each.
        mask: [1, count, 1, longest], minus infinity behind the end of a run; None where all are as long.
    """

    slots: Slots
    count: int
    longest: int
    indices: Tensor
    mask: Tensor | None

    def signature(self) -> tuple[int, ...]:
        """What a recorded pass depends on, beside the values in its tensors."""
        sizes = (self.slots.capacity, self.slots.allocation, self.count, self.longest, len(self.indices))
        return (*sizes, self.mask is None)

    def tensors(self) -> list[Tensor]:
        """What is put into a recorded pass."""
        return [self.indices] if self.mask is None else [self.indices, self.mask]

    def attend(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of some queries to each run.

        Args:
            layer: Its number.
            query: [count, queries, query_heads, head_dim].
            scale: Of the dot products.

        Returns:
            [count * queries, query_heads, head_dim], and [count * queries, query_heads], the logarithms of the sums by
            which the softmax divides.
        """
        keys, values = (tensor[:, : self.count, : self.longest] for tensor in self.slots.layer(layer))
        count, queries, heads, width = query.shape
        # The query heads that share a key head are computed as its several queries.
        kv_heads, repeat = len(keys), heads // len(keys)
        together = query.reshape(count, queries, kv_heads, repeat, width).permute(2, 0, 1, 3, 4).flatten(2, 3)
        output, normalizer = _attend(together, keys, values, self.mask, scale)
        output = output.reshape(kv_heads, count, queries, repeat, width).permute(1, 2, 0, 3, 4)
        normalizer = normalizer.reshape(kv_heads, count, queries, repeat).permute(1, 2, 0, 3)
        return output.reshape(-1, heads, width), normalizer.reshape(-1, heads)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """[heads, n, queries, head_dim], and [heads, n, queries]: the logarithm of what the softmax divides by."""
    mask = None if mask is None else mask.to(query.dtype)
    if query.device.type == "cpu":
        return cast("tuple[Tensor, Tensor]", flash_on_cpu(query, key, value, attn_mask=mask, scale=scale))
    scores = (query @ key.transpose(2, 3)).float() * scale
    scores = scores if mask is None else scores + mask
    normalizer = scores.logsumexp(dim=-1)
    return (scores - normalizer.unsqueeze(-1)).exp().to(value.dtype) @ value, normalizer


def _mask(lengths: Sequence[int], longest: int, device: torch.device) -> Tensor:
    """Zero within a run, minus infinity behind it; a run without a token has one that nobody will use."""
    ends = torch.tensor(lengths, device=device).clamp(min=1)
    is_behind = torch.arange(longest, device=device)[None, :] >= ends[:, None]
    return torch.zeros(is_behind.shape, device=device).masked_fill_(is_behind, -torch.inf)[None, :, None, :]


class SharedPrompts:
    """Attention of responses to the prompts that they share with siblings."""

    def __init__(
        self, store: RunStore, prompts: Sequence[Run | None], rounding: Rounding, device: torch.device
    ) -> None:
        """Plan the calls, which are the same until responses come or go.

        Args:
            store: Of the prompts.
            prompts: Of each row of the pass; None where its prompt is in its own run.
            rounding: Of shapes.
            device: Where the pass runs.
        """
        readers: dict[Run, list[int]] = {}
        for row, prompt in enumerate(prompts):
            if prompt is not None:
                readers.setdefault(prompt, []).append(row)
        self.parts: list[_Part] = []
        self.place, offset = torch.zeros(len(prompts), dtype=torch.int64), 0
        for slots in store:
            groups = [readers.get(run, []) for run in slots.runs]
            count, width = round_up(len(groups), rounding.rows), max(1, *map(len, groups))
            width = width if rounding.rows == 1 else 1 << (width - 1).bit_length()
            rows = torch.zeros(count, width, dtype=torch.int64)
            for number, group in enumerate(groups):
                rows[number, : len(group)] = torch.tensor(group, dtype=torch.int64)
                self.place[group] = offset + number * width + torch.arange(len(group))
            lengths = [run.length for run in slots.runs] + [0] * (count - len(groups))
            longest = min(round_up(max(lengths), rounding.tokens), slots.capacity)
            mask = None if rounding.rows == 1 and min(lengths) == longest else _mask(lengths, longest, device)
            self.parts.append(_Part(slots, count, longest, rows.flatten().to(device), mask))
            offset += count * width
        in_order = torch.arange(len(prompts))
        # Until a response ends, its siblings and it lie side by side, and nothing has to be put in order.
        self._is_in_order = (
            rounding.rows == 1
            and len(self.parts) == 1
            and all(
                len(order) == len(prompts) and torch.equal(order.cpu(), in_order)
                for order in (self.place, self.parts[0].indices)
            )
        )
        self.place = self.place.to(device)
        is_read = torch.tensor([prompt is not None for prompt in prompts])
        self.is_read = None if bool(is_read.all()) else is_read.float()[:, None].to(device)

    def signature(self) -> tuple[int, ...]:
        """What a recorded pass depends on, beside the values in its tensors."""
        return (
            self.is_read is None,
            self._is_in_order,
            *(number for part in self.parts for number in part.signature()),
        )

    def tensors(self) -> list[Tensor]:
        """What is put into a recorded pass."""
        others = [self.place] if self.is_read is None else [self.place, self.is_read]
        return [*others, *(tensor for part in self.parts for tensor in part.tensors())]

    def merge(self, layer: int, query: Tensor, output: Tensor, normalizer: Tensor, scale: float) -> Tensor:
        """Attention to prompts and own tokens, of the two: each counts as much as its share of the exponentials.

        Args:
            layer: Its number.
            query: [n, query_heads, head_dim].
            output: [n, query_heads, head_dim], of the attention to own tokens.
            normalizer: [n, query_heads], the logarithm of what its softmax divides by.
            scale: Of the dot products.

        Returns:
            [n, query_heads, head_dim].
        """
        results: list[tuple[Tensor, Tensor]] = []
        for part in self.parts:
            readers = query if self._is_in_order else query.index_select(0, part.indices)
            results.append(part.attend(layer, readers.reshape(part.count, -1, *query.shape[1:]), scale))
        other, other_normalizer = _joined(results)
        if not self._is_in_order:
            other, other_normalizer = (t.index_select(0, self.place) for t in (other, other_normalizer))
        share = (other_normalizer - normalizer).sigmoid_().unsqueeze(2)
        if self.is_read is not None:
            share *= self.is_read.unsqueeze(2)
        return output.lerp(other, share.to(output.dtype))


def _joined(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(results) == 1:
        return results[0]
    outputs, normalizers = zip(*results, strict=True)
    return torch.cat(outputs), torch.cat(normalizers)


class DecodeAttention:
    """Attention of one new token of each response to its prompt and to all of its tokens so far.

    The rows of the pass are the runs of the responses, in the order of their sizes and slots.
    """

    def __init__(
        self, store: RunStore, shared: SharedPrompts | None, longest: int, rounding: Rounding, device: torch.device
    ) -> None:
        """Prepare a pass.

        Args:
            store: Of the responses; each run has room for a token more.
            shared: Prompts that are not in these runs; None where all are.
            longest: Tokens of the longest sequence, its prompt included.
            rounding: Of shapes.
            device: Where the pass runs.
        """
        self.shared, self.longest = shared, longest
        self._parts: list[_Part] = []
        for slots in store:
            count = round_up(len(slots.runs), rounding.rows)
            lengths = [run.length for run in slots.runs] + [0] * (count - len(slots.runs))
            most = min(round_up(max(lengths) + 1, rounding.tokens), slots.capacity)
            ends = [length + 1 for length in lengths]
            mask = None if rounding.rows == 1 and min(ends) == most else _mask(ends, most, device)
            places = torch.tensor([slot * slots.capacity + length for slot, length in enumerate(lengths)])
            self._parts.append(_Part(slots, count, most, places.to(device), mask))

    def signature(self) -> tuple[int, ...]:
        """What a recorded pass depends on, beside the values in its tensors."""
        shared = () if self.shared is None else self.shared.signature()
        return (len(self._parts), *(number for part in self._parts for number in part.signature()), *shared)

    def allocations(self) -> frozenset[int]:
        """The memory of keys and values that a recorded pass goes on reading and writing."""
        parts = self._parts if self.shared is None else [*self._parts, *self.shared.parts]
        return frozenset(part.slots.allocation for part in parts)

    def tensors(self) -> list[Tensor]:
        """What is put into a recorded pass."""
        shared = [] if self.shared is None else self.shared.tensors()
        return [*(tensor for part in self._parts for tensor in part.tensors()), *shared]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Attention`."""
        counts = [part.count for part in self._parts]
        results: list[tuple[Tensor, Tensor]] = []
        for part, q, k, v in zip(
            self._parts, *(torch.split(tensor, counts) for tensor in (query, key, value)), strict=True
        ):
            part.slots.write(layer, part.indices, k, v)
            results.append(part.attend(layer, q.unsqueeze(1), scale))
        output, normalizer = _joined(results)
        return output if self.shared is None else self.shared.merge(layer, query, output, normalizer, scale)
