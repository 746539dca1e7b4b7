"""Attention to prompts that are computed once for all of their continuations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from leaderless.models.attention.blocks import PromptBlock, Repeats, SequenceCopies, following
from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.npu import MAX_SEQUENCES, FusionAttention, attend_packed, fusion_attention
from leaderless.models.attention.packed import Attention, PackedAttention, attend_padded
from leaderless.models.attention.recurrence import Mixer
from leaderless.models.uploads import placed


@dataclass(frozen=True)
class Family:
    """A prompt and its continuations, of which there may be none: a tree of tokens.

    The tokens are consecutive: the prompt, then each continuation, right behind the one that it continues or behind all
    that continue its last sibling. A continuation attends to itself and to all that it continues, back to the prompt,
    never to its siblings.

    Attributes:
        prompt: Number of tokens of the prompt, at least 1.
        continuations: Numbers of tokens of the continuations, at least 1.
        parents: Number of the continuation that each of them continues, -1 for the prompt; without any, all of them
            continue the prompt.
    """

    prompt: int
    continuations: tuple[int, ...]
    parents: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt, counted once, and of all continuations."""
        return self.prompt + sum(self.continuations)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence, from the first token of the prompt on."""
        return max(block.length for block in blocks_of([self]))


def attention_over(families: Sequence[Family], device: torch.device, compute_dtype: torch.dtype) -> Attention:
    """Choose the fastest attention for a pass over consecutive families."""
    if device.type == "cpu":
        return JoinedAttention([*blocks_of(families)], device)
    if compute_dtype in {torch.bfloat16, torch.float16}:
        if device.type == "cuda":
            return VarlenAttention(families, device)
        if (fused := fusion_attention(device)) is not None and len(list(blocks_of(families))) <= MAX_SEQUENCES:
            return NpuAttention(families, device, fused)
    return ExpandedAttention(families, device)


def blocks_of(families: Sequence[Family]) -> Iterator[PromptBlock]:
    """Cut a pass into blocks, each token in one of them; a single continuation is one block with what it continues."""
    begin = end = 0
    for family in families:
        parents = family.parents or (-1,) * len(family.continuations)
        counts, paths = Counter(parents), list[tuple[range, ...]]()  # paths: what continuations of each part continue
        for part, length in enumerate((family.prompt, *family.continuations), start=-1):
            path, end = paths[parents[part] + 1] if part >= 0 else (), end + length
            if counts[part] != 1:
                yield PromptBlock(path, range(begin, end))
                path, begin = (*path, range(begin, end)), end
            paths.append(path)


def sequences_of(families: Sequence[Family]) -> Iterator[Tensor]:
    """The places in the pass of the tokens of each sequence, from the first of its prompt on."""
    blocks = [*blocks_of(families)]
    continued = following(blocks)
    yield from (block.places for block in blocks if block.own not in continued)


def _copies(blocks: Sequence[PromptBlock], device: torch.device) -> Repeats:
    """The tokens of a pass, each block behind copies of what it continues."""
    rows = torch.cat([block.places for block in blocks])
    return Repeats(rows, int(rows.max()) + 1, device)


class VarlenAttention(JoinedAttention):
    """FlashAttention over blocks of any length; keys of what a block continues are copied before its own."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        super().__init__(blocks := list(blocks_of(families)), device)
        lengths = torch.tensor([[0, 0], *([len(block.own), block.length] for block in blocks)])
        self._query_ends, self._key_ends = placed(lengths.cumsum(0).int().t().contiguous(), device)
        self._longest_query, self._longest_key = lengths.amax(0).tolist()
        self._key_copies = _copies(blocks, device) if any(block.before for block in blocks) else None
        # torch 2.11 supports groups of heads without this argument, which it does not have.
        self._attend = (
            partial(varlen_attn, enable_gqa=True) if "enable_gqa" in signature(varlen_attn).parameters else varlen_attn
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attend in one call of FlashAttention, which aligns the last query of a block with its last key."""
        if not form._replace(kind=replace(form.kind, window=None)).is_plain:
            return super().attend(layer, query, key, value, form)
        if self._key_copies is not None:
            key, value = self._key_copies.take(key), self._key_copies.take(value)
        output = self._attend(
            query,
            key,
            value,
            self._query_ends,
            self._key_ends,
            self._longest_query,
            self._longest_key,
            scale=form.scale,
            window_size=(-1 if form.kind.window is None else form.kind.window - 1, 0),
        )
        return cast("Tensor", output)


class NpuAttention(JoinedAttention):
    """Ascend's fused attention over blocks, with the same keys as `VarlenAttention`."""

    def __init__(self, families: Sequence[Family], device: torch.device, fused: FusionAttention) -> None:
        self._fused = fused
        super().__init__(blocks := list(blocks_of(families)), device)
        self._query_ends = list(accumulate(len(block.own) for block in blocks))
        self._key_ends = list(accumulate(block.length for block in blocks))
        self._key_copies = _copies(blocks, device) if any(block.before for block in blocks) else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attend in one call of the fused kernel, with copies of what each block continues."""
        if not form.is_plain:
            return super().attend(layer, query, key, value, form)
        if self._key_copies is not None:
            key, value = self._key_copies.take(key), self._key_copies.take(value)
        return attend_packed(self._fused, query, key, value, self._query_ends, self._key_ends, form.scale)


class ExpandedAttention(JoinedAttention):
    """Attention of blocks that each have copies of what they continue."""

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        super().__init__([*blocks_of(families)], device)
        self._packed = PackedAttention([len(block.own) for block in self._copies.blocks], device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attend to the copies, and keep each token's own result."""
        if form.chosen is not None:
            return super().attend(layer, query, key, value, form)
        query, key, value = (self._copies.take(values) for values in (query, key, value))
        return self._copies.own(self._packed.attend(layer, query, key, value, form))


class _Continuations:
    """The continuations of a prompt that continue nothing else, padded to the longest, which attend in one call."""

    def __init__(self, begin: int, family: Family, device: torch.device) -> None:
        counts = torch.tensor(family.continuations)[:, None]
        ends = begin + family.prompt + counts.cumsum(0)
        steps = torch.arange(int(counts.max()))[None, :]
        # Padding repeats the last token; its keys come after those that real tokens attend to.
        self._rows = placed(torch.minimum(ends - counts + steps, ends - 1), device)
        self._real = placed((steps < counts).flatten().nonzero().squeeze(1), device)
        places = torch.arange(family.prompt + steps.shape[1])
        self._is_seen = placed((places <= family.prompt + steps[0, :, None])[None, None], device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, prompt: slice, scale: float) -> Tensor:
        """Results of all continuations, [tokens, query_heads, head_dim]."""
        count, rows = len(self._rows), self._rows.flatten()
        queries, *own = (
            one.index_select(0, rows).view(*self._rows.shape, *one.shape[1:]) for one in (query, key, value)
        )
        before = (one[prompt].expand(count, *one[prompt].shape) for one in (key, value))
        keys, values = (torch.cat(pair, dim=1).transpose(1, 2) for pair in zip(before, own, strict=True))
        found = attend_padded(queries.transpose(1, 2), keys, values, self._is_seen.expand(count, -1, -1, -1), scale)
        return found.transpose(1, 2).flatten(0, 1).index_select(0, self._real)


class PrefixAttention:
    """Attention of models whose prompts are read in both directions, as PaliGemma's: prefix language models.

    Each token of a prompt attends to all of the prompt. A continuation attends to the prompt, and causally to itself.
    Source: PaliGemma, arXiv 2407.07726, figure 2.
    """

    def __init__(self, families: Sequence[Family], device: torch.device) -> None:
        self._families: list[tuple[slice, _Continuations | None]] = []
        self._copies: SequenceCopies | None = None
        if any(family.parents for family in families):  # continuations of others are copied, for each sequence
            owners = [(family.prompt, block) for family in families for block in blocks_of([family])]
            self._copies = SequenceCopies([*blocks_of(families)], device)
            families = [Family(prompt, (block.length - prompt,) * (block.length > prompt)) for prompt, block in owners]
        begin = 0
        for family in families:
            after = _Continuations(begin, family, device) if family.continuations else None
            self._families.append((slice(begin, begin + family.prompt), after))
            begin += family.num_tokens

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:  # noqa: ARG002
        """Refuse: a recurrence has a direction."""
        raise RuntimeError(f"layer {layer} reads by recurrence, but prompts are read in both directions")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attend within each prompt, then from its continuations to the prompt and themselves."""
        if not form.is_plain:
            raise RuntimeError(
                f"layer {layer} has a window, a bound or sinks, which are not supported for models that read prompts "
                "in both directions"
            )
        if self._copies is not None:
            query, key, value = (self._copies.take(one) for one in (query, key, value))
        results: list[Tensor] = []
        for prompt, after in self._families:
            q, k, v = (one[prompt].transpose(0, 1)[None] for one in (query, key, value))
            length = prompt.stop - prompt.start
            is_seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device)
            results.append(attend_padded(q, k, v, is_seen, form.scale)[0].transpose(0, 1))
            if after is not None:
                results.append(after.attend(query, key, value, prompt, form.scale))
        found = torch.cat(results)
        return found if self._copies is None else self._copies.own(found)
